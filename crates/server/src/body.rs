//! From bytes to typed bodies: what is wrong is named by its field, and nothing is ignored.

use crate::error::{ApiError, ApiResult};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use utoipa::PartialSchema;
use utoipa::openapi::{RefOr, Schema};

/// A body, or a part of it, whose fields are known by its schema.
pub(crate) trait Fields: DeserializeOwned + PartialSchema {
    /// The names of its fields.
    fn names() -> Vec<String> {
        match Self::schema() {
            RefOr::T(Schema::Object(object)) => object.properties.keys().cloned().collect(),
            _ => Vec::new(),
        }
    }
}

impl<T: DeserializeOwned + PartialSchema> Fields for T {}

/// The JSON object of a body. A field that is null counts as absent.
pub(crate) fn object(bytes: &[u8]) -> ApiResult<Map<String, Value>> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(mut map)) => {
            map.retain(|_, value| !value.is_null());
            Ok(map)
        }
        Ok(_) => Err(ApiError::bad("the body must be a JSON object")),
        Err(error) => Err(ApiError::bad(format!("the body is not valid JSON: {error}"))),
    }
}

/// Takes the fields of `T` out of an object.
pub(crate) fn take<T: Fields>(map: &mut Map<String, Value>) -> ApiResult<T> {
    let mut own = Map::new();
    for name in T::names() {
        if let Some(value) = map.shift_remove(&name) {
            own.insert(name, value);
        }
    }
    serde_path_to_error::deserialize(Value::Object(own)).map_err(|error| {
        // The key itself is at fault where the path ends so.
        let path = error.path().to_string().trim_end_matches(".?").to_owned();
        let inner = error.into_inner().to_string();
        // A missing field has no path of its own.
        match inner.strip_prefix("missing field `").and_then(|rest| rest.split('`').next()) {
            Some(field) if path == "." => ApiError::field(field, format!("{field} is required")),
            Some(field) => ApiError::field(&path, format!("{path}.{field} is required")),
            None => ApiError::field(&path, mismatch(&path, &inner)),
        }
    })
}

/// What serde says of a value of another type, in words of JSON. Only the beginning of a long value is told again.
fn mismatch(path: &str, said: &str) -> String {
    const SHOWN: usize = 100;
    // Where it is in the text is known by its path.
    let said = said.rsplit_once(" at line ").map_or(said, |(said, _)| said);
    let told = said.strip_prefix("invalid type: ").or_else(|| said.strip_prefix("invalid value: "));
    let Some((given, expected)) = told.and_then(|told| told.rsplit_once(", expected ")) else {
        return format!("{path}: {said}");
    };
    let expected = match expected {
        "f64" => "a number",
        "i32" | "i64" => "a whole number",
        "u32" | "u64" | "usize" => "a whole number, 0 or more",
        "a boolean" => "true or false",
        "a string" => "a text",
        "a sequence" => "a list",
        "a map" => "an object",
        other => other,
    };
    let (shown, rest) = given.split_at(given.floor_char_boundary(SHOWN));
    let rest = if rest.is_empty() { "" } else { "…" };
    format!("{path} must be {expected}, not {shown}{rest}")
}

/// Refuses what nobody has taken.
pub(crate) fn finish(map: &Map<String, Value>) -> ApiResult<()> {
    match map.keys().next() {
        Some(field) => Err(ApiError {
            code: Some("unknown_parameter"),
            ..ApiError::field(field, format!("{field} is not a field of this endpoint"))
        }),
        None => Ok(()),
    }
}

/// A body that consists of the fields of `T` only.
pub(crate) fn parse<T: Fields>(bytes: &[u8]) -> ApiResult<T> {
    let mut map = object(bytes)?;
    let body = take(&mut map)?;
    finish(&map)?;
    Ok(body)
}

/// A body with the fields of two types.
pub(crate) fn parse_both<A: Fields, B: Fields>(bytes: &[u8]) -> ApiResult<(A, B)> {
    let mut map = object(bytes)?;
    let bodies = (take(&mut map)?, take(&mut map)?);
    finish(&map)?;
    Ok(bodies)
}

/// `value` if it is from `least` to `most`.
pub(crate) fn in_range<T: PartialOrd + std::fmt::Display>(
    field: &str,
    value: T,
    least: T,
    most: T,
) -> ApiResult<T> {
    if value >= least && value <= most {
        return Ok(value);
    }
    Err(ApiError::field(field, format!("{field} is {value}: it must be from {least} to {most}")))
}

/// Refuses an empty list, and one of more than `most` elements.
pub(crate) fn not_too_many(field: &str, count: usize, most: usize) -> ApiResult<()> {
    if (1..=most).contains(&count) {
        return Ok(());
    }
    Err(ApiError::field(field, format!("{field} has {count} elements: it must have from 1 to {most}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use utoipa::ToSchema;

    #[derive(Debug, Deserialize, ToSchema)]
    struct One {
        a: i64,
        list: Option<Vec<Inner>>,
    }
    #[derive(Debug, Deserialize, ToSchema)]
    struct Inner {
        x: f64,
    }
    #[derive(Debug, Deserialize, ToSchema)]
    struct Two {
        b: Option<String>,
    }
    #[derive(Debug, Deserialize, ToSchema)]
    struct Three {
        #[serde(rename = "count")]
        _count: Option<usize>,
        #[serde(rename = "bias")]
        _bias: Option<std::collections::BTreeMap<u32, f64>>,
    }

    #[test]
    fn every_field_is_taken_or_named() {
        let (one, two) = parse_both::<One, Two>(br#"{"a": 1, "b": "x", "list": [{"x": 0.5}]}"#).unwrap();
        assert_eq!((one.a, one.list.unwrap()[0].x, two.b.as_deref()), (1, 0.5, Some("x")));
        assert!(parse::<One>(br#"{"a": 1, "list": null}"#).unwrap().list.is_none());
        let param = |body: &str| parse_both::<One, Two>(body.as_bytes()).unwrap_err().param;
        assert_eq!(param(r#"{"b": "x"}"#).as_deref(), Some("a"));
        assert_eq!(param(r#"{"a": null}"#).as_deref(), Some("a"));
        assert_eq!(param(r#"{"a": 1.5}"#).as_deref(), Some("a"));
        assert_eq!(param(r#"{"a": true}"#).as_deref(), Some("a"));
        assert_eq!(param(r#"{"a": 1, "list": [{"x": 1}, {"x": "y"}]}"#).as_deref(), Some("list[1].x"));
        assert_eq!(param(r#"{"a": 1, "list": [{}]}"#).as_deref(), Some("list[0]"));
        assert_eq!(param(r#"{"a": 1, "c": 1}"#).as_deref(), Some("c"));
        for body in ["", "[]", "{", "\"a\"", "{\"a\": 1} x", &"[".repeat(100_000)] {
            assert_eq!(parse::<One>(body.as_bytes()).unwrap_err().status, 400, "{body:.9}");
        }
    }

    #[test]
    fn other_types_are_told_in_words_of_json() {
        let told = |body: &str| {
            let error = parse::<Three>(body.as_bytes()).unwrap_err();
            (error.param.unwrap(), error.message)
        };
        for (body, param, message) in [
            (r#"{"count": -1}"#, "count", "count must be a whole number, 0 or more, not integer `-1`"),
            (r#"{"count": "a, expected b"}"#, "count", "not string \"a, expected b\""),
            (r#"{"bias": {"5": true}}"#, "bias.5", "bias.5 must be a number, not boolean `true`"),
            (r#"{"bias": {"x": 1}}"#, "bias", "a number in quotes"),
            (r#"{"bias": {"-1": 1}}"#, "bias.-1", "must be a whole number, 0 or more"),
            (r#"{"bias": []}"#, "bias", "bias must be an object, not sequence"),
        ] {
            let (own, said) = told(body);
            assert!(
                own == param && said.contains(message) && !said.contains(" line "),
                "{body}: {own}: {said}"
            );
        }
        let long = format!("{{\"count\": \"{}\"}}", "ü".repeat(1000));
        assert!(told(&long).1.len() < 300 && told(&long).1.ends_with("…"));
    }

    #[test]
    fn ranges_are_named() {
        assert!(in_range("top_p", 1.0, 0.0, 1.0).is_ok());
        let error = in_range("top_p", 1.5, 0.0, 1.0).unwrap_err();
        assert_eq!(error.message, "top_p is 1.5: it must be from 0 to 1");
        assert!(in_range("top_p", f64::NAN, 0.0, 1.0).is_err());
    }
}
