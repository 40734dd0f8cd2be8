//! What a chat is made of: lines in, messages and commands, and the conversation.

pub(crate) mod conversation;
pub(crate) mod input;
pub(crate) mod words;
