//! What can go wrong with a chat template.

/// A chat template that cannot be used, or a conversation that it refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template itself says that it cannot render these messages.
    #[error("the chat template says: {message}")]
    Raised {
        /// The template's message.
        message: String,
    },
    /// The template is not Jinja.
    #[error("the chat template has an error in line {line}: {why}")]
    Syntax {
        /// The line in the template, from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// The template failed on these messages.
    #[error("the chat template failed in line {line}: {why}")]
    Render {
        /// The line in the template, from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// The template does not end, or its output is larger than any context.
    #[error("the chat template takes too many steps or makes too much text")]
    TooLong,
    /// The model has no chat template.
    #[error("the model has no chat template; give one, or use a plain prompt")]
    None,
    /// The model has several templates and none is called default.
    #[error("the model has no default chat template; choose one of: {names}")]
    NoDefault {
        /// The templates that there are.
        names: String,
    },
    /// The prompt is made by program code, which lmx does not have.
    #[error("the model's prompt format is chat_template_type {kind:?} of mlx-lm, which lmx does not have")]
    ByCode {
        /// The `chat_template_type`.
        kind: String,
    },
    /// A variable would change nothing.
    #[error("the chat template takes no variable {name}; it takes: {read}")]
    Variable {
        /// The variable.
        name: String,
        /// Those that change something.
        read: String,
    },
    /// The conversation has no message.
    #[error("the conversation is empty; give at least one message")]
    NoMessages,
    /// A message is not an object.
    #[error("message {index} is not an object")]
    NotAMessage {
        /// The message, from 0.
        index: usize,
    },
    /// `continue_final_message` cannot be honoured.
    #[error("the final message cannot be continued: {why}")]
    Continue {
        /// Why.
        why: String,
    },
}
