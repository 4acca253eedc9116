//! Text identity: covers the conversion of text to tokens, and of messages to a prompt.
//!
//! The [`WeightsId`](super::WeightsId) leaves both out: for a host, two files with equal outputs
//! for equal tokens are the same model. For a user they are not: a chat template with one sentence
//! more still has the genuine weights. `specs/weights-identity.md` has the rules.

use serde::Serialize;

use super::TextId;
use crate::gguf::Gguf;
use crate::tokenizer_parts::{TokenizerError, TokenizerParts, WordParts, drops_space};

const FORMAT: &str = "hearthnet-text-1";

/// Encoded as deterministic CBOR (RFC 8949 section 4.2.1), for which the fields stand in the order
/// of their encoded names.
#[derive(Serialize)]
struct Encoded<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    bos: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eos: Option<u32>,
    #[serde(skip_serializing_if = "str::is_empty")]
    pre: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    ends: &'a [(&'static str, u32)],
    #[serde(skip_serializing_if = "Option::is_none")]
    kinds: Option<&'a [i128]>,
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    words: Option<WordParts>,
    format: &'static str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    merges: &'a [&'a str],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    scores: &'a [f32],
    tokens: &'a [&'a str],
    #[serde(skip_serializing_if = "Option::is_none")]
    add_bos: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    add_eos: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    template: Option<&'a str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    drops_space: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    space_prefix: Option<bool>,
}

impl Gguf {
    /// Identity of tokenizer and chat template. Two files with the same id turn the same messages
    /// into the same tokens.
    ///
    /// # Errors
    /// The file has no tokenizer, or an unsupported one.
    pub fn text_id(&self) -> Result<TextId, TokenizerError> {
        let parts = TokenizerParts::from_gguf(self)?;
        let mut bytes = Vec::new();
        let encoded = Encoded {
            bos: parts.bos,
            eos: parts.eos,
            pre: parts.pre,
            ends: &parts.other_ends,
            kinds: parts.token_types.as_deref(),
            model: parts.model,
            words: parts.words,
            format: FORMAT,
            merges: &parts.merges,
            scores: &parts.scores,
            tokens: &parts.tokens,
            add_bos: parts.add_bos,
            add_eos: parts.add_eos,
            template: self.str("tokenizer.chat_template")?,
            drops_space: drops_space(parts.name),
            space_prefix: parts.add_space_prefix,
        };
        ciborium::into_writer(&encoded, &mut bytes).map_err(TokenizerError::build)?;
        Ok(TextId::of(&bytes))
    }
}
