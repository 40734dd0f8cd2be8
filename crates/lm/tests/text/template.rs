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

#[test]
fn what_changes_a_rendering_is_read() {
    let file: Renderings = golden_json("templates.json");
    let probe = serde_json::json!({"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}});
    let (mut with_tools, mut changes) = (std::collections::BTreeSet::new(), 0);
    for (name, case, ..) in &file.rows {
        let source =
            std::fs::read_to_string(golden().join("templates").join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(&source, &SpecialTokens::default(), false).unwrap();
        if template.reads("tools", true) {
            with_tools.insert(name.as_str());
        }
        assert!(!template.reads("probe", true));
        let (conversation, case) = &file.cases[*case];
        let messages = file.conversations[conversation].as_array().unwrap();
        let base = RenderOptions { now: Some(file.now), ..options(case, &file.special) };
        let mut differ = |variable: &str, one: RenderOptions, other: RenderOptions| {
            if let (Ok(one), Ok(other)) = (template.render(messages, &one), template.render(messages, &other))
                && one != other
            {
                changes += 1;
                assert!(template.reads(variable, true), "{name} reads {variable}");
            }
        };
        let tools = |tools| RenderOptions { tools, ..base.clone() };
        differ("tools", tools(None), tools(Some(vec![probe.clone()])));
        for variable in
            ["enable_thinking", "reasoning_effort", "controls", "citation_mode", "bos_token", "documents"]
        {
            let set = |value: Value| {
                let mut options = RenderOptions { documents: None, ..base.clone() };
                options.variables.insert(variable.to_owned(), value);
                options
            };
            let list = serde_json::json!([{"title": "t", "text": "x"}]);
            for [one, other] in
                [[true.into(), false.into()], ["low".into(), "high".into()], [list, Value::Null]]
            {
                differ(variable, set(one), set(other));
            }
        }
    }
    assert!(changes > 200, "{changes}");
    let known = [
        "channels",
        "chatml_tools",
        "compact_json",
        "gmask",
        "headers_tools_in_user",
        "headers_with_date",
        "roles_dated",
        "strict_turns",
        "xml_tools_modes",
    ];
    assert_eq!(with_tools.into_iter().collect::<Vec<_>>(), known);
}

#[test]
fn variables_that_nobody_reads_are_told() {
    let source = "{% set depth = depth or 1 %}{{ depth }}{{ colour }}{{ bos_token }}{{ raise_exception and '' }}\
        {% for m in messages %}{{ m.shade }}{{ loop.index }}{{ strftime_now('x') and '' }}{% endfor %}";
    let check = |thinking: bool, variables: Value| {
        let template = ChatTemplate::new(source, &SpecialTokens::default(), thinking).unwrap();
        template.check_variables(variables.as_object().unwrap(), false)
    };
    for fine in ["{}", "{\"depth\": 2, \"colour\": \"red\", \"bos_token\": \"\"}", "{\"shade\": null}"] {
        assert_eq!(check(false, serde_json::from_str(fine).unwrap()), Ok(()));
    }
    for thinking in [true, false] {
        assert_eq!(check(thinking, serde_json::json!({"enable_thinking": thinking})), Ok(()));
        assert!(check(thinking, serde_json::json!({"enable_thinking": !thinking})).is_err());
    }
    for name in ["shade", "messages", "tools", "add_generation_prompt"] {
        let error = check(false, serde_json::json!({"colour": 1, name: 1})).unwrap_err();
        let read = "bos_token, colour".to_owned();
        assert_eq!(error, TemplateError::Variable { name: name.to_owned(), read });
    }
}
