//! vLLM's paths for the tokenizer of a model, which `lm_eval` asks. Pure.

use axum::http::StatusCode;
use hearthnet_http::ApiError;
use hearthnet_tokens::Special;
use serde_json::{Value, json};

use crate::api::fields::{Fields, wrong};
use crate::chat::TextModel;

/// Request of `/tokenize` or `/detokenize`.
#[derive(Debug)]
pub(in crate::api::http) struct Asked {
    /// `None` if the client names no model.
    pub(in crate::api::http) model: Option<String>,
    task: Task,
}

#[derive(Debug)]
enum Task {
    Encode {
        text: String,
        /// With the tokens that begin and end a text.
        whole: bool,
    },
    Decode(Vec<u32>),
}

/// Reads a request of `/tokenize`.
pub(in crate::api::http) fn tokenize(body: &[u8]) -> Result<Asked, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.text("model")?;
    let text = fields.needed("prompt")?;
    let whole = fields.bool("add_special_tokens")?.unwrap_or(true);
    fields.nothing_left(&[])?;
    let task = Task::Encode { text, whole };
    Ok(Asked { model, task })
}

/// Reads a request of `/detokenize`.
pub(in crate::api::http) fn detokenize(body: &[u8]) -> Result<Asked, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.text("model")?;
    let ids = fields.list("tokens")?.into_iter();
    let ids = ids.map(|id| u32::try_from(id.as_u64()?).ok());
    let ids = ids.collect::<Option<Vec<u32>>>();
    let ids = ids.filter(|ids| !ids.is_empty());
    let ids = ids.ok_or_else(|| wrong("tokens", "a list of token ids that is not empty"))?;
    fields.nothing_left(&[])?;
    let task = Task::Decode(ids);
    Ok(Asked { model, task })
}

impl Asked {
    /// Takes time that grows with the text.
    pub(in crate::api::http) fn answer(self, model: &TextModel) -> Result<Value, ApiError> {
        let tokenizer = &model.tokenizer;
        match self.task {
            Task::Encode { text, whole } => {
                // As in Hugging Face's tokenizers, names of control tokens are these tokens.
                let ids = match whole {
                    true => tokenizer.encode_document(&text, Special::Parse),
                    false => tokenizer.encode(&text, Special::Parse),
                };
                let bad = |why: String| ApiError::new(StatusCode::BAD_REQUEST, "bad_request", why);
                let ids = ids.map_err(|why| bad(why.to_string()))?;
                Ok(json!({
                    "count": ids.len(), "max_model_len": model.context, "tokens": ids,
                }))
            }
            Task::Decode(ids) => Ok(json!({"prompt": tokenizer.decode_with_special(&ids)})),
        }
    }
}

/// Answer of `/tokenizer_info`.
pub(in crate::api::http) fn info(model: &TextModel) -> Value {
    let tokenizer = &model.tokenizer;
    let name = |id: Option<u32>| id.map(|id| tokenizer.decode_with_special(&[id]));
    json!({
        "tokenizer_class": "hearthnet", "bos_token": name(tokenizer.bos()),
        "eos_token": name(tokenizer.eos()), "pad_token": null,
        "model_max_length": model.context,
    })
}
