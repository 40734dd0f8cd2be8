//! What the harness asks, a JSON object a line. Each is answered by `{"result": …}` or `{"error": "…"}`.

use serde::Deserialize;
use serde_json::{Map, Value};

/// What is asked.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    /// What is to be evaluated? The first line; the key tells that it comes from the process that was started.
    Hello { key: String, harness: String },
    /// Load the model: the tasks are known to exist.
    Load {},
    /// How likely continuations are after their contexts.
    Loglikelihood(Vec<(String, String)>),
    /// How likely texts are.
    LoglikelihoodRolling(Vec<(String,)>),
    /// How contexts go on, with the `generation_kwargs` of the task.
    GenerateUntil(Vec<(String, Map<String, Value>)>),
    /// The text of a conversation.
    ApplyChatTemplate { messages: Vec<Value>, add_generation_prompt: bool },
    /// What belongs beside the results.
    Describe {},
    /// The last line: it went well.
    Finished(Finished),
    /// The last line: it did not, for this reason.
    Failed(String),
}

/// What came of it.
#[derive(Debug, Deserialize)]
pub(crate) struct Finished {
    /// For people.
    pub(crate) table: String,
    /// What the harness wrote.
    pub(crate) files: Vec<String>,
    /// The metrics of each task.
    pub(crate) results: Value,
}
