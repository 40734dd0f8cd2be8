//! Chat templates: Jinja, rendered byte for byte as transformers renders them.

mod sources;

pub(crate) use sources::TemplateSources;
