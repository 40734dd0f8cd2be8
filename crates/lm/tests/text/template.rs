//! Chat templates against transformers (data by tests/gen/text_jinja.py and text_templates.py).

use crate::common::text_data::{golden, golden_json};
use lmx::text::{ChatTemplate, RenderOptions, SpecialTokens, TemplateError};
use serde_json::Value;

#[test]
fn every_feature_renders_as_in_transformers() {
    let file: Value = golden_json("jinja.json");
    let mut variables = file["context"].as_object().unwrap().clone();
    let messages = variables.remove("messages").unwrap().as_array().unwrap().clone();
    let tools = variables.remove("tools").unwrap().as_array().unwrap().clone();
    let options = RenderOptions {
        add_generation_prompt: true,
        tools: Some(tools),
        variables,
        ..RenderOptions::default()
    };
    let mut wrong = Vec::new();
    for row in file["rows"].as_array().unwrap() {
        let snippet = row[0].as_str().unwrap();
        let template = ChatTemplate::new(snippet, &SpecialTokens::default(), false);
        let got = template.and_then(|template| template.render(&messages, &options));
        let right = match (row[1].as_str(), &got) {
            (Some(want), Ok(got)) => want == got,
            (None, Err(TemplateError::Raised { message })) => row[3].as_str() == Some(message),
            (None, Err(_)) => row[2] == "error",
            _ => false,
        };
        if !right {
            wrong.push(format!("{snippet}\n  want {}\n  got  {got:?}", &row[1]));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    for snippet in file["unsupported"].as_array().unwrap() {
        let template = ChatTemplate::new(snippet.as_str().unwrap(), &SpecialTokens::default(), false);
        let got = template.and_then(|template| template.render(&messages, &options));
        assert!(got.is_err(), "{snippet}: {got:?}");
    }
}

#[derive(serde::Deserialize)]
struct Renderings {
    conversations: serde_json::Map<String, Value>,
    now: chrono::NaiveDateTime,
    special: serde_json::Map<String, Value>,
    /// A conversation's name and the options.
    cases: Vec<(String, serde_json::Map<String, Value>)>,
    /// Template, case, text, and if there is none the template's message or "error".
    rows: Vec<(String, usize, Option<String>, Option<String>)>,
}

/// The options of a case; what is not an option is a variable for the template.
fn options(case: &serde_json::Map<String, Value>, special: &serde_json::Map<String, Value>) -> RenderOptions {
    let list = |key: &str| case.get(key).and_then(Value::as_array).cloned();
    let flag = |key: &str| case.get(key).and_then(Value::as_bool).unwrap_or_default();
    let mut variables = special.clone();
    variables.extend(case.clone());
    RenderOptions {
        add_generation_prompt: flag("add_generation_prompt"),
        continue_final_message: flag("continue_final_message"),
        tools: list("tools"),
        documents: list("documents"),
        variables,
        now: None,
    }
}

#[test]
fn whole_templates_render_as_in_transformers() {
    let file: Renderings = golden_json("templates.json");
    let folder = golden().join("templates");
    let mut wrong = Vec::new();
    for (name, case, want, refusal) in &file.rows {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(&source, &SpecialTokens::default(), false).unwrap();
        let (conversation, case) = &file.cases[*case];
        let options = RenderOptions { now: Some(file.now), ..options(case, &file.special) };
        let got = template.render(file.conversations[conversation].as_array().unwrap(), &options);
        let right = match (want, &got) {
            (Some(want), Ok(got)) => want == got,
            (None, Err(TemplateError::Raised { message })) => refusal.as_ref() == Some(message),
            (None, Err(_)) => refusal.as_deref() == Some("error"),
            _ => false,
        };
        if !right {
            wrong
                .push(format!("{name} {conversation} {case:?}\n  want {want:?} {refusal:?}\n  got  {got:?}"));
        }
    }
    assert!(file.rows.len() > 700);
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
