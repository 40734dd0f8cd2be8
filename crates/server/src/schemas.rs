//! What `/openapi.json` says of values that no type of ours is made of: they go to chat templates, or to the compiler of
//! grammars, as they come.

use serde_json::{Map, Value};
use utoipa::openapi::{Ref, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Names for the types of fields, each of an entry of schemas.json.
macro_rules! described {
    ($($name:ident)*) => {$(
        pub(crate) enum $name {}

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                Ref::from_schema_name(stringify!($name)).into()
            }
        }

        impl ToSchema for $name {}
    )*};
}

described! {
    AnthropicMessage AnthropicThinking AnthropicTool AnthropicToolChoice ChatMessage ChatTool ChatToolChoice LogprobsCount
    OneOrMany Prompts ResponseFormat ResponsesInput ResponsesTool ResponsesToolChoice SystemText TextFormat
}

/// All entries, by name.
pub(crate) fn definitions() -> Map<String, Value> {
    serde_json::from_str(include_str!("schemas.json")).unwrap_or_default()
}
