//! Small files, made byte by byte, so that a test can make any of their bytes wrong.
#![allow(dead_code, reason = "each user takes what it needs")]

/// A safetensors file of this header and as many data bytes.
pub(crate) fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

/// About 2 kB: plain tensors, a quantized layer, metadata.
pub(crate) fn valid_safetensors() -> Vec<u8> {
    let entry = |name: &str, dtype: &str, shape: &[usize], begin: usize, end: usize| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
    };
    let entries = [
        r#""__metadata__":{"format":"mlx"}"#.to_owned(),
        entry("model.norm.weight", "F32", &[16], 0, 64),
        entry("model.q.weight", "U32", &[4, 8], 64, 192),
        entry("model.q.scales", "F16", &[4, 2], 192, 208),
        entry("model.q.biases", "F16", &[4, 2], 208, 224),
        entry("model.x.weight", "U32", &[4, 4], 224, 288),
        entry("model.x.scales", "U8", &[4, 1], 288, 292),
        entry("model.embed.weight", "BF16", &[8, 64], 292, 1316),
        entry("model.none", "I64", &[0], 1316, 1316),
        entry("model.scalar", "F64", &[], 1316, 1324),
    ];
    safetensors(&format!("{{{}}}", entries.join(",")), 1324)
}

/// A GGUF file in parts. [`bytes`](Self::bytes) writes what the parts say, sensible or not.
#[derive(Clone)]
pub(crate) struct Gguf {
    pub(crate) version: u32,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) key_count: Option<u64>,
    pub(crate) keys: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub(crate) tensors: Vec<GgufTensor>,
    pub(crate) alignment: usize,
    pub(crate) data: usize,
}

#[derive(Clone)]
pub(crate) struct GgufTensor {
    pub(crate) name: Vec<u8>,
    pub(crate) dims: Vec<u64>,
    pub(crate) id: u32,
    pub(crate) offset: u64,
}

/// Eight bytes of length, then the text.
pub(crate) fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// An array value: element type, count, elements.
pub(crate) fn array(id: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&id.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

impl Gguf {
    /// About 2 kB: a value of every type and tensors of several.
    pub(crate) fn valid() -> Self {
        let key = |name: &str, id: u32, value: &[u8]| (name.as_bytes().to_vec(), id, value.to_vec());
        let tensor = |name: &str, dims: &[u64], id: u32, offset: u64| GgufTensor {
            name: name.as_bytes().to_vec(),
            dims: dims.to_vec(),
            id,
            offset,
        };
        Self {
            version: 3,
            tensor_count: None,
            key_count: None,
            keys: vec![
                key("general.architecture", 8, &text(b"llama")),
                key("k.u8", 0, &[7]),
                key("k.i8", 1, &[0xff]),
                key("k.u16", 2, &[1, 2]),
                key("k.i16", 3, &[1, 2]),
                key("k.u32", 4, &5u32.to_le_bytes()),
                key("k.i32", 5, &(-5i32).to_le_bytes()),
                key("k.f32", 6, &1.5f32.to_le_bytes()),
                key("k.bool", 7, &[1]),
                key("k.u64", 10, &5u64.to_le_bytes()),
                key("k.i64", 11, &(-5i64).to_le_bytes()),
                key("k.f64", 12, &1.5f64.to_le_bytes()),
                key("k.texts", 9, &array(8, 3, &[text(b"a"), text(b""), text(b"bc")].concat())),
                key("k.ints", 9, &array(5, 2, &[1, 0, 0, 0, 2, 0, 0, 0])),
                key("general.alignment", 4, &32u32.to_le_bytes()),
            ],
            tensors: vec![
                tensor("token_embd.weight", &[32, 8], 8, 0),
                tensor("blk.0.attn_norm.weight", &[32], 0, 288),
                tensor("blk.0.attn_q.weight", &[64, 4], 2, 416),
                tensor("blk.0.attn_k.weight", &[256, 2], 12, 576),
                tensor("blk.0.attn_v.weight", &[16, 4], 30, 864),
            ],
            alignment: 32,
            data: 992,
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, id, value) in &self.keys {
            bytes.extend(text(key));
            bytes.extend(id.to_le_bytes());
            bytes.extend(value);
        }
        for tensor in &self.tensors {
            bytes.extend(text(&tensor.name));
            bytes.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
            bytes.extend(tensor.id.to_le_bytes());
            bytes.extend(tensor.offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend((0..self.data).map(|i| i as u8));
        bytes
    }
}
