//! `/v1/embeddings`: a vector for each text, from any decoder.

use crate::app::App;
use crate::body;
use crate::error::{ApiError, ApiResult};
use crate::fields::{OneOrMany, check_prompt};
use crate::schemas::Prompts;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use lmx::engine::{Pooling, Request, Update};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

/// Texts of one request at most.
const INPUTS_MAX: usize = 2048;

/// The body.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Body {
    model: Option<String>,
    /// A text, a list of texts, token ids, or a list of lists of ids.
    #[schema(value_type = Prompts)]
    input: Input,
    /// `mean` of the tokens' vectors (default), or that of the `last` token.
    pooling: Option<String>,
    /// Make the length of each vector 1 (default true).
    normalize: Option<bool>,
    /// Only `float`, or `base64` of little-endian 32-bit floats.
    encoding_format: Option<String>,
    /// Only the model's own number.
    dimensions: Option<usize>,
    /// Who asks; has no effect.
    #[serde(rename = "user")]
    _user: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text, a list of texts, token ids, or a list of lists of token ids")]
enum Input {
    Text(OneOrMany),
    Tokens(Vec<u32>),
    Lists(Vec<Vec<u32>>),
}

/// Answers a request.
pub(crate) async fn answer(State(app): State<Arc<App>>, bytes: Bytes) -> ApiResult<Json<Value>> {
    let body: Body = body::parse(&bytes)?;
    let model = app.models.get(body.model.as_deref()).await?;
    let pooling = match body.pooling.as_deref() {
        None | Some("mean") => Pooling::Mean,
        Some("last") => Pooling::Last,
        Some(other) => return Err(ApiError::field("pooling", format!("pooling is {other:?}: mean or last"))),
    };
    let base64 = match body.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("encoding_format is {other:?}: float or base64");
            return Err(ApiError::field("encoding_format", message));
        }
    };
    if let Some(asked) = body.dimensions.filter(|&asked| asked != model.width) {
        let message = format!("dimensions is {asked}: the vectors of this model have {}", model.width);
        return Err(ApiError::field("dimensions", message));
    }
    let count = match &body.input {
        Input::Text(OneOrMany::One(_)) | Input::Tokens(_) => 1,
        Input::Text(OneOrMany::Many(texts)) => texts.len(),
        Input::Lists(lists) => lists.len(),
    };
    body::not_too_many("input", count, INPUTS_MAX)?;
    let inputs = match body.input {
        Input::Text(texts) => {
            let encode = || texts.into_vec().iter().map(|text| model.encode(text)).collect::<ApiResult<_>>();
            let encoded: ApiResult<Vec<Vec<u32>>> = app.work(&bytes, encode).await;
            encoded.map_err(|error| error.renamed("prompt", "input"))?
        }
        Input::Tokens(tokens) => vec![tokens],
        Input::Lists(lists) => lists,
    };
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    let mut requests = Vec::new();
    for tokens in inputs {
        check_prompt(&tokens, &model)
            .map_err(|error| ApiError { param: Some("input".to_owned()), ..error })?;
        let (max_tokens, adapter) = (Some(0), model.adapter.clone());
        requests.push(vec![Request {
            tokens,
            max_tokens,
            adapter,
            embedding: Some(pooling),
            ..Request::default()
        }]);
    }
    let mut vectors: Vec<Vec<f32>> = vec![Vec::new(); requests.len()];
    let mut running = app.begin(&model, requests)?;
    while let Some(next) = running.next().await {
        if let (index, Update::Embedding(vector)) = next?
            && let Some(slot) = vectors.get_mut(index)
        {
            *slot = vector;
        }
    }
    let normalize = body.normalize.unwrap_or(true);
    let data = vectors.into_iter().enumerate().map(|(index, mut vector)| {
        if normalize {
            to_unit(&mut vector);
        }
        let value = if base64 { Value::String(encode(&vector)) } else { json!(vector) };
        json!({"object": "embedding", "index": index, "embedding": value})
    });
    let data: Vec<Value> = data.collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(Json(json!({"object": "list", "data": data, "model": model.name, "usage": usage})))
}

/// Makes the length of a vector 1, unless it is 0.
fn to_unit(vector: &mut [f32]) {
    let length = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

/// The floats' bytes in base64, as OpenAI's clients ask for by default.
fn encode(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    BASE64_STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_floats() {
        assert_eq!(encode(&[]), "");
        assert_eq!(encode(&[1.0]), "AACAPw==");
        assert_eq!(encode(&[1.0, -2.0]), "AACAPwAAAMA=");
        assert_eq!(encode(&[1.0, -2.0, 0.5]), "AACAPwAAAMAAAAA/");
    }

    #[test]
    fn vectors_become_units() {
        let mut vector = [3.0, 4.0];
        to_unit(&mut vector);
        assert_eq!(vector, [0.6, 0.8]);
        let mut zero = [0.0];
        to_unit(&mut zero);
        assert_eq!(zero, [0.0]);
    }
}
