//! The readers of files: what real writers wrote, what is refused and how the message says so.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod build;

use std::path::Path;

use build::{Gguf, GgufTensor, array, text};
use lmx_tensor::files::gguf::{Array, Value};
use lmx_tensor::files::{Bytes, DType, FileError, GgufFile, SafetensorsFile};

/// What to make wrong, and how it is named.
type Case<'a, T> = (&'a dyn Fn(&mut T), &'a str);

fn parse_safetensors(bytes: Vec<u8>) -> Result<SafetensorsFile, String> {
    SafetensorsFile::parse(Path::new("m.safetensors"), &Bytes::from(bytes)).map_err(|error| error.to_string())
}

fn parse_gguf(file: &Gguf) -> Result<GgufFile, String> {
    GgufFile::parse(Path::new("m.gguf"), &Bytes::from(file.bytes())).map_err(|error| error.to_string())
}

fn refused_safetensors(header: &str, data: usize) -> String {
    let message = parse_safetensors(build::safetensors(header, data)).unwrap_err();
    message.strip_prefix("m.safetensors: ").unwrap().to_owned()
}

fn refused_gguf(change: impl Fn(&mut Gguf)) -> String {
    let mut file = Gguf::valid();
    change(&mut file);
    let message = parse_gguf(&file).unwrap_err();
    message.strip_prefix("m.gguf: ").unwrap().to_owned()
}

#[test]
fn a_valid_safetensors_file_is_lent() {
    let file = parse_safetensors(build::valid_safetensors()).unwrap();
    assert_eq!(file.metadata().get("format").unwrap(), "mlx");
    assert_eq!(file.names().count(), 9);
    assert!(file.contains("model.q.scales") && !file.contains("__metadata__"));
    let tensor = file.tensor("model.q.weight").unwrap();
    assert_eq!((tensor.dtype(), tensor.shape(), tensor.data()[0]), (DType::U32, &[4, 8][..], 64));
    assert!(file.tensor("model.scalar").unwrap().shape().is_empty());
    assert_eq!(file.tensor("model.none").unwrap().data().len(), 0);
    assert_eq!(
        file.tensor("lm_head.weight").unwrap_err().to_string(),
        "m.safetensors: tensor \"lm_head.weight\": is missing"
    );
}

#[test]
fn a_header_may_be_padded_and_its_metadata_null() {
    let file = parse_safetensors(build::safetensors(r#"{"__metadata__":null}   "#, 0)).unwrap();
    assert_eq!((file.names().count(), file.metadata().len()), (0, 0));
}

#[test]
fn what_is_wrong_with_a_safetensors_file_is_named() {
    let entry = |name: &str, rest: &str| format!(r#""{name}":{{"dtype":{rest}}}"#);
    let one = |rest: &str| format!("{{{}}}", entry("w", rest));
    let valid = r#""F32","shape":[2],"data_offsets":[0,8]"#;
    let cases = [
        (
            one(r#""Q7","shape":[2],"data_offsets":[0,8]"#),
            8,
            r#"tensor "w": dtype is "Q7"; allowed is BOOL, U8"#,
        ),
        (
            one(r#""F32","shape":[3],"data_offsets":[0,8]"#),
            8,
            r#"tensor "w": its data is 8 bytes, but shape [3] of type F32 takes 12"#,
        ),
        (
            one(r#""F32","shape":[2],"data_offsets":[0,8]"#),
            7,
            r#"tensor "w": its data is bytes 0 to 8 of the data section, which has 7 bytes"#,
        ),
        (
            one(r#""F32","shape":[2],"data_offsets":[8,0]"#),
            8,
            r#"tensor "w": its data is bytes 8 to 0 of the data section"#,
        ),
        (
            one(r#""F32","shape":[2],"data_offsets":[4,12]"#),
            12,
            r#"tensor data is not what the header describes: bytes 0 to 4 before tensor "w" belong to no tensor"#,
        ),
        (
            one(valid),
            9,
            "tensor data is not what the header describes: the tensors end at byte 8, the data section has 9 bytes",
        ),
        (
            one(r#""F32","shape":[9223372036854775808,2],"data_offsets":[0,8]"#),
            8,
            r#"tensor "w": shape [9223372036854775808, 2] with type F32 has more bytes than can be counted"#,
        ),
        (
            one(r#""F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]"#),
            8,
            r#"tensor "w": the number of dimensions is 9; allowed is up to 8"#,
        ),
        (
            one(r#""F32","shape":[-2],"data_offsets":[0,8]"#),
            8,
            r#"the header is not the JSON of a safetensors file: entry "w": invalid value: integer `-2`, expected u64"#,
        ),
        (
            one(r#""F32","shape":[2.5],"data_offsets":[0,8]"#),
            8,
            r#"the header is not the JSON of a safetensors file: entry "w": invalid type: floating point `2.5`, expected u64"#,
        ),
        (
            one(r#""F32","shape":[2]"#),
            8,
            r#"the header is not the JSON of a safetensors file: entry "w": missing field `data_offsets`"#,
        ),
        (format!("{{{},{}}}", entry("w", valid), entry("w", valid)), 8, r#"tensor "w": occurs twice"#),
        (
            format!("{{{},{}}}", entry("v", valid), entry("w", r#""F32","shape":[2],"data_offsets":[4,12]"#)),
            12,
            r#"tensor "w": its data overlaps that of tensor "v""#,
        ),
        (
            r#"{"__metadata__":{},"__metadata__":{}}"#.to_owned(),
            0,
            r#"the header is not the JSON of a safetensors file: entry "__metadata__": occurs twice"#,
        ),
        (
            r#"{"__metadata__":{"a":1}}"#.to_owned(),
            0,
            r#"the header is not the JSON of a safetensors file: entry "__metadata__": invalid type: integer `1`"#,
        ),
        ("[]".to_owned(), 0, "the header is not the JSON of a safetensors file: invalid type: sequence"),
        ("{}x".to_owned(), 0, "the header is not the JSON of a safetensors file: trailing characters"),
        (format!("{{{}", entry("w", valid)), 8, "the header is not the JSON of a safetensors file: EOF"),
        (
            format!(r#"{{"{}":1}}"#, "x".repeat(1025)),
            0,
            "the header is not the JSON of a safetensors file: a tensor name has 1025 bytes; allowed is up to 1024",
        ),
    ];
    for (header, data, message) in cases {
        let found = refused_safetensors(&header, data);
        assert!(found.starts_with(message), "{header}\n found: {found}\nwanted: {message}");
        assert!(!found.contains('\n'), "{found}");
    }
    let refused = |bytes: Vec<u8>| parse_safetensors(bytes).unwrap_err();
    assert_eq!(
        refused(vec![1, 2]),
        "m.safetensors: is truncated or corrupt: the header length needs 8 bytes from byte 0 on, the file has 2 in all"
    );
    assert_eq!(
        refused([9, 0, 0, 0, 0, 0, 0, 0, b'{'].to_vec()),
        "m.safetensors: is truncated or corrupt: the header needs 9 bytes from byte 8 on, the file has 9 in all"
    );
    assert_eq!(
        refused(u64::MAX.to_le_bytes().to_vec()),
        "m.safetensors: the header length is 18446744073709551615; allowed is up to 100000000 bytes"
    );
    assert_eq!(
        refused([1, 0, 0, 0, 0, 0, 0, 0, 0xff].to_vec()),
        "m.safetensors: the header is not valid UTF-8"
    );
}

#[test]
fn metadata_of_every_type_is_read_as_gguf_py_wrote_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/formats/blocks.gguf");
    let file = GgufFile::open(&path).unwrap();
    let metadata = file.metadata();
    assert_eq!(file.version(), 3);
    for (key, value) in [
        ("test.u8", Value::Uint(200)),
        ("test.i8", Value::Int(-100)),
        ("test.u16", Value::Uint(60000)),
        ("test.i16", Value::Int(-30000)),
        ("test.u32", Value::Uint(4_000_000_000)),
        ("test.i32", Value::Int(-2_000_000_000)),
        ("test.u64", Value::Uint((1 << 63) + 1)),
        ("test.i64", Value::Int(-(1 << 62))),
        ("test.f32", Value::F32(0.1)),
        ("test.f64", Value::F64(0.1)),
        ("test.bool", Value::Bool(true)),
        ("test.text", Value::Text("Grüße, 世界".to_owned())),
        ("test.texts", Value::Array(Array::Text(vec!["a".to_owned(), String::new(), "ĠĊ".to_owned()]))),
        ("test.ints", Value::Array(Array::Int(vec![3, -1, 2]))),
        ("test.floats", Value::Array(Array::F32(vec![0.5, -1.5]))),
        ("test.bools", Value::Array(Array::Bool(vec![true, false]))),
        ("test.bytes", Value::Array(Array::Uint(vec![1, 255]))),
    ] {
        assert_eq!(metadata.get(key), Some(&value), "{key}");
    }
    assert_eq!(metadata.get_u32("general.alignment").unwrap(), Some(64));
    assert_eq!(metadata.get_str("general.architecture").unwrap(), Some("test"));
}

#[test]
fn the_getters_of_metadata_check_types() {
    let file = parse_gguf(&Gguf::valid()).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.get_u64("k.u8").unwrap(), Some(7));
    assert_eq!(metadata.get_f32("k.f64").unwrap(), Some(1.5));
    assert_eq!(metadata.get_bool("k.bool").unwrap(), Some(true));
    assert_eq!(metadata.get_strs("k.texts").unwrap().unwrap(), ["a", "", "bc"]);
    assert_eq!(metadata.get_ints("k.ints").unwrap().unwrap(), [1, 2]);
    assert_eq!(metadata.get_u64("absent").unwrap(), None);
    let message = |outcome: Result<(), FileError>| outcome.unwrap_err().to_string();
    assert_eq!(
        message(metadata.get_u64("k.i8").map(drop)),
        "m.gguf: metadata key \"k.i8\" is -1; allowed is a non-negative integer"
    );
    assert_eq!(
        message(metadata.get_str("k.texts").map(drop)),
        "m.gguf: metadata key \"k.texts\" is an array of strings; allowed is a string"
    );
    assert_eq!(
        message(metadata.get_f32s("general.architecture").map(drop)),
        "m.gguf: metadata key \"general.architecture\" is the string \"llama\"; allowed is an array of floats"
    );
    assert_eq!(
        metadata.missing_error("llama.block_count").to_string(),
        "m.gguf: metadata key \"llama.block_count\" is missing"
    );
}

#[test]
fn gguf_tensors_are_lent_outermost_dimension_first() {
    for version in [2, 3] {
        let file = parse_gguf(&Gguf { version, ..Gguf::valid() }).unwrap();
        assert_eq!(file.version(), version);
        let tensor = file.tensor("blk.0.attn_q.weight").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape(), tensor.data().len()), (DType::Q4_0, &[4, 64][..], 144));
        assert_eq!(tensor.data()[0], (416 % 256) as u8);
    }
    let file = Gguf { tensors: vec![], data: 0, alignment: 1, ..Gguf::valid() };
    assert_eq!(parse_gguf(&file).unwrap().names().count(), 0, "an unpadded file without tensors");
}

#[test]
fn what_is_wrong_with_the_header_of_a_gguf_file_is_named() {
    let cases: [Case<Gguf>; 6] = [
        (&|f| f.version = 1, "the GGUF version is 1; allowed is 2 or 3, little-endian"),
        (&|f| f.version = 4, "the GGUF version is 4; allowed is 2 or 3, little-endian"),
        (
            &|f| f.version = 3u32.swap_bytes(),
            "the GGUF version is big-endian; allowed is 2 or 3, little-endian",
        ),
        (
            &|f| f.tensor_count = Some(1 << 40),
            "the number of tensors is 1099511627776; allowed is up to 65536",
        ),
        (&|f| f.key_count = Some(65537), "the number of metadata keys is 65537; allowed is up to 65536"),
        (
            &|f| f.data = 991,
            "tensor \"blk.0.attn_v.weight\": its data is bytes 864 to 992 of the data section, which has 991 bytes: is the file cut short?",
        ),
    ];
    for (change, message) in cases {
        assert_eq!(refused_gguf(change), message);
    }
    let message =
        GgufFile::parse(Path::new("m.gguf"), &Bytes::from(b"GGML\x03\0".to_vec())).unwrap_err().to_string();
    assert_eq!(message, "m.gguf: the magic number is \"GGML\"; allowed is \"GGUF\"");
}

#[test]
fn what_is_wrong_with_the_metadata_of_a_gguf_file_is_named() {
    let add = |key: &[u8], id: u32, value: &[u8]| {
        refused_gguf(|file| file.keys.push((key.to_vec(), id, value.to_vec())))
    };
    assert_eq!(add(b"k.u8", 0, &[1]), "metadata key \"k.u8\" occurs twice");
    assert_eq!(add(b"\xff", 0, &[1]), "metadata key 15 is not valid UTF-8");
    assert_eq!(add(b"x", 13, &[]), "the type of the value of metadata key \"x\" is 13; allowed is 0 to 12");
    assert_eq!(add(b"x", 7, &[2]), "the value of metadata key \"x\" is 2; allowed is 0 or 1 (a bool)");
    assert_eq!(add(b"x", 8, &text(b"\xc3")), "the value of metadata key \"x\" is not valid UTF-8");
    assert_eq!(
        add(b"x", 8, &(1u64 << 40).to_le_bytes()),
        "the length of the value of metadata key \"x\" is 1099511627776; allowed is up to 67108864 bytes"
    );
    assert!(
        add(b"x", 8, &60_000u64.to_le_bytes()).starts_with(
            "is truncated or corrupt: the value of metadata key \"x\" needs 60000 bytes from byte"
        )
    );
    assert_eq!(
        add(b"x", 9, &array(9, 1, &array(0, 1, &[1]))),
        "the type of the value of metadata key \"x\" is 9; allowed is 0 to 8 and 10 to 12 (no array of arrays)"
    );
    assert_eq!(
        add(b"x", 9, &array(4, 1 << 60, &[])),
        "the array length of the value of metadata key \"x\" is 1152921504606846976; allowed is up to 16777216"
    );
    assert!(add(b"x", 9, &array(12, 1 << 20, &[])).starts_with(
        "is truncated or corrupt: the value of metadata key \"x\" needs 8388608 bytes from byte"
    ));
    assert!(
        add(b"x", 9, &array(8, 2, &[text(b"a"), text(b"\xff")].concat()))
            .starts_with("element 1 of the value of metadata key \"x\" is not valid UTF-8")
    );
    assert!(
        refused_gguf(|file| file.keys.push((vec![b'k'; 65536], 0, vec![1])))
            .starts_with("the length of metadata key 15 is 65536; allowed is up to 65535 bytes")
    );
    for (alignment, found) in [(0u32, "0"), (24, "24"), (1 << 20, "1048576")] {
        assert_eq!(
            refused_gguf(|file| file.keys[14].2 = alignment.to_le_bytes().to_vec()),
            format!("metadata key \"general.alignment\" is {found}; allowed is a power of two up to 65536")
        );
    }
}

#[test]
fn what_is_wrong_with_a_tensor_of_a_gguf_file_is_named() {
    let name = "tensor \"blk.0.attn_q.weight\": ";
    let cases: [Case<GgufTensor>; 8] = [
        (&|t| t.id = 20, "the type is 20 (IQ4_NL); allowed is F32, F16, BF16, Q4_0"),
        (&|t| t.id = 77, "the type is 77; allowed is F32, F16, BF16, Q4_0"),
        (&|t| t.dims = vec![32; 9], "the number of dimensions is 9; allowed is up to 4"),
        (&|t| t.dims = vec![48, 4], "the last dimension is 48; allowed is a multiple of 32 for type Q4_0"),
        (
            &|t| t.dims = vec![1 << 32, 1 << 32],
            "shape [4294967296, 4294967296] with type Q4_0 has more bytes than can be counted",
        ),
        (&|t| t.offset = 417, "the offset is 417; allowed is a multiple of the alignment 32"),
        (
            &|t| t.offset = u64::MAX - 31,
            "its data is bytes 18446744073709551584 to 18446744073709551615 of the data section",
        ),
        (
            &|t| t.offset = 1 << 40,
            "its data is bytes 1099511627776 to 1099511627920 of the data section, which has 992 bytes",
        ),
    ];
    for (change, message) in cases {
        let found = refused_gguf(|file| change(&mut file.tensors[2]));
        let named = found.strip_prefix(name).is_some_and(|rest| rest.starts_with(message));
        assert!(named, "found: {found}\nwanted: {message}");
    }
    assert_eq!(
        refused_gguf(|file| file.tensors[2].offset = 448),
        "tensor \"blk.0.attn_k.weight\": its data overlaps that of tensor \"blk.0.attn_q.weight\""
    );
    assert_eq!(
        refused_gguf(|file| file.tensors[2].name = b"token_embd.weight".to_vec()),
        "tensor \"token_embd.weight\": occurs twice"
    );
    assert_eq!(
        refused_gguf(|file| file.tensors[2].name = vec![0xff]),
        "the name of tensor 2 is not valid UTF-8"
    );
    assert_eq!(
        refused_gguf(|file| file.tensors[2].name = vec![b'x'; 2000]),
        "the length of the name of tensor 2 is 2000; allowed is up to 1024 bytes"
    );
}

#[test]
fn paths_that_are_no_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let message = GgufFile::open(folder.path()).unwrap_err().to_string();
    assert_eq!(message, format!("{}: is not a regular file", folder.path().display()));
    let absent = folder.path().join("model.safetensors");
    let message = SafetensorsFile::open(&absent).unwrap_err().to_string();
    assert_eq!(
        message,
        format!("{}: cannot be read: No such file or directory (os error 2)", absent.display())
    );
    std::fs::write(&absent, b"").unwrap();
    let message = SafetensorsFile::open(&absent).unwrap_err().to_string();
    assert!(message.contains("the header length needs 8 bytes"), "{message}");
}
