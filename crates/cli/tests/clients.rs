//! The server driven by the real Python clients of OpenAI and Anthropic: tests/clients/drive.py says what is tried.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::model::{Model, Then};
use common::server::Server;
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn the_clients_of_openai_and_anthropic_get_what_they_ask_for() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let packages = std::env::var_os("LMX_TEST_CLIENTS").map_or(root.join("target/clients"), PathBuf::from);
    assert!(packages.exists(), "{} is missing: run scripts/test", packages.display());
    let models = std::env::var_os("LMX_TEST_MODELS").map_or(root.join("models"), PathBuf::from);
    let real = models.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(real.exists(), "{} is missing: run scripts/test, or set LMX_TEST_MODELS", real.display());
    let pieces: [&[u8]; 7] = [
        b"Let me see. ",
        b"<tool",
        b"_call>\n{\"name\": \"get_w",
        b"eather\", \"argu",
        b"ments\": {\"city\"",
        b": \"Rome\"}}\n</tool_c",
        b"all>",
    ];
    let caller = Model::script(&pieces, Then::End);
    caller.edit("tokenizer_config.json", |config| config["tool_parser_type"] = json!("json_tools"));
    let (real, script) = (Server::start(real.to_str().unwrap(), &[]), Server::start(caller.path(), &[]));
    let url = |server: &Server| format!("http://127.0.0.1:{}", server.port);
    let output = Command::new("python3")
        .arg(root.join("tests/clients/drive.py"))
        .args([url(&real), url(&script)])
        .env("PYTHONPATH", packages)
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("all ok"), "{text}");
}
