//! Vectors of texts: requests of OpenAI's API, and the responses of it and of Ollama's. Pure.
//!
//! The texts are embedded in groups, each of which waits and runs as one chat (`prompts.rs`).

use std::convert::Infallible;
use std::ops::Range;

use axum::body::{Body, Bytes};
use axum::http::{Response, header};
use axum::response::IntoResponse as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream;
use hearthnet_files::{Pooling, WeightsId};
use hearthnet_http::ApiError;
use serde_json::{Value, json};

use super::reply::fingerprint;
use super::request::{GivenPrompt, MAX_USER};
use crate::api::fields::{Fields, Refused, invalid, unsupported};
use crate::chat::{Done, EmbedRequest, Embedding, Frame, Prompt, TextModel, tokens_of};
use crate::error::ChatError;
use crate::exact::{Arithmetics, Exact};

/// Maximum number of texts of one request, as in OpenAI's API.
pub(super) const MAX_INPUTS: usize = 2048;

/// Maximum memory of the vectors of one request: 1,024 vectors of 4,096 values.
const MAX_BYTES: usize = 16 << 20;

/// Maximum number of tokens of a group of several texts. Other callers have turns between groups.
const GROUP_TOKENS: usize = 512;

/// Parsed request.
pub(super) struct EmbeddingsRequest {
    pub(super) model: String,
    pub(super) inputs: Vec<Prompt>,
    /// Field with the inputs.
    pub(super) field: &'static str,
    /// Whether that is a list, of which an error names the element.
    pub(super) is_list: bool,
    /// Length of the vectors; only the model's own is supported.
    pub(super) dimensions: Option<u64>,
    /// Whether texts that are too long are cut.
    pub(super) truncate: bool,
    pub(super) exact: Option<Exact>,
    pub(super) user: String,
    pub(super) format: VectorFormat,
}

/// Form of the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VectorFormat {
    /// `/v1/embeddings`, with lists of numbers.
    Floats,
    /// The same, with base64 of the values as little-endian f32.
    Base64,
    /// Ollama's `/api/embed`.
    Ollama,
    /// Ollama's `/api/embeddings`: one vector.
    OlderOllama,
}

/// Parses a request of `/v1/embeddings`.
pub(super) fn request(body: &[u8]) -> Result<EmbeddingsRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    let model = fields.model()?;
    let name = "input";
    let must = format!(
        "a text, a list of token ids, or a list of 1 to {MAX_INPUTS} texts or of such lists"
    );
    let given = fields
        .read(name, &must, |given: &GivenPrompt| {
            (1..=MAX_INPUTS).contains(&given.count())
        })?
        .ok_or_else(|| invalid(name, "`input` is missing: the text to embed"))?;
    let is_list = given.is_list();
    let formats = "one of float, base64";
    let format = fields.read("encoding_format", formats, |name: &String| {
        ["float", "base64"].contains(&name.as_str())
    })?;
    let dimensions = fields.integer("dimensions", 1, u64::MAX)?;
    let user = fields.text("user")?;
    let exact = fields.exact()?;
    fields.all_read(&[])?;
    let request = EmbeddingsRequest {
        model,
        inputs: given.into_prompts(),
        field: name,
        is_list,
        dimensions,
        truncate: false,
        exact,
        user: user.unwrap_or_default().chars().take(MAX_USER).collect(),
        format: match format.as_deref() {
            Some("base64") => VectorFormat::Base64,
            _ => VectorFormat::Floats,
        },
    };
    request.no_empty_input()?;
    Ok(request)
}

impl EmbeddingsRequest {
    /// Name of an input in errors.
    fn name_of(&self, index: usize) -> String {
        match self.is_list {
            true => format!("{}[{index}]", self.field),
            false => self.field.to_owned(),
        }
    }

    /// Refuses inputs without text: their vector would be that of a start token, or of nothing.
    ///
    /// # Errors
    /// Names the first of them.
    pub(super) fn no_empty_input(&self) -> Result<(), Refused> {
        let is_empty = |input: &Prompt| match input {
            Prompt::Text(text) => text.is_empty(),
            Prompt::Tokens(ids) => ids.is_empty(),
            Prompt::Messages(_) => false,
        };
        match self.inputs.iter().position(is_empty) {
            None => Ok(()),
            Some(index) => {
                let at = self.name_of(index);
                Err(invalid(&at, format!("`{at}` must not be empty")))
            }
        }
    }

    /// Bytes of the vectors, each of `width` values.
    ///
    /// # Errors
    /// 400 for another number of dimensions, and for too many inputs.
    pub(super) fn bytes(&self, width: usize) -> Result<usize, ApiError> {
        if self.dimensions.is_some_and(|asked| asked != width as u64) {
            let problem = format!(
                "`dimensions` other than {width} is not supported: the vectors of this model have \
                 {width} values, and their beginnings mean nothing by themselves"
            );
            return Err(unsupported("dimensions", problem).into());
        }
        let bytes = self.inputs.len().saturating_mul(width.saturating_mul(4));
        if bytes > MAX_BYTES {
            let most = MAX_BYTES / (4 * width.max(1));
            let problem = format!(
                "`{}` must have at most {most} texts: the vectors of this model have {width} values",
                self.field
            );
            return Err(invalid(self.field, problem).into());
        }
        Ok(bytes)
    }

    /// Token ids of each input. May take a while.
    ///
    /// # Errors
    /// The name of an input, and what is wrong with it.
    pub(super) fn tokens(&self, model: &TextModel) -> Result<Vec<Vec<u32>>, (String, ChatError)> {
        let tokens = self.inputs.iter().enumerate().map(|(index, input)| {
            let tokens = tokens_of(model, input, self.truncate);
            tokens.map_err(|error| (self.name_of(index), error))
        });
        tokens.collect()
    }
}

/// Consecutive inputs of a request that are embedded by one chat: as many as have
/// [`GROUP_TOKENS`] tokens, at least one.
pub(super) fn groups(inputs: &[Vec<u32>]) -> Vec<Range<usize>> {
    let (mut groups, mut begin, mut tokens) = (Vec::new(), 0, 0);
    for (index, input) in inputs.iter().enumerate() {
        tokens += input.len();
        if tokens > GROUP_TOKENS && index > begin {
            groups.push(begin..index);
            (begin, tokens) = (index, input.len());
        }
    }
    if begin < inputs.len() {
        groups.push(begin..inputs.len());
    }
    groups
}

/// Vectors of a request, as they arrive.
pub(super) struct Vectors {
    groups: Vec<Range<usize>>,
    /// Number of groups that have not ended.
    left: usize,
    vectors: Vec<Option<Embedding>>,
    tokens: u32,
    arithmetic: Arithmetics,
    /// Time until hosts were found for the first group.
    construct_ms: f64,
}

impl Vectors {
    /// Vectors of these inputs, and the requests for them, one for each group.
    pub(super) fn ask(inputs: Vec<Vec<u32>>, exact: Option<Exact>) -> (Self, Vec<EmbedRequest>) {
        let groups = groups(&inputs);
        let vectors = Self {
            left: groups.len(),
            vectors: vec![None; inputs.len()],
            tokens: 0,
            arithmetic: Arithmetics::default(),
            construct_ms: 0.0,
            groups,
        };
        let mut inputs = inputs.into_iter();
        let requests = vectors.groups.iter().map(|group| EmbedRequest {
            inputs: inputs.by_ref().take(group.len()).collect(),
            exact,
        });
        let requests = requests.collect();
        (vectors, requests)
    }

    /// Takes a frame of a group. Returns true once all groups have ended.
    pub(super) fn take(&mut self, group: usize, frame: Frame) -> bool {
        match frame {
            Frame::ChoiceDone { choice, done } => self.keep(group, choice as usize, *done),
            Frame::Done(done) => {
                self.left = self.left.saturating_sub(1);
                self.tokens = self.tokens.saturating_add(done.usage.prompt_tokens);
                self.arithmetic.extend(done.arithmetic.clone());
                if self.construct_ms == 0.0 {
                    self.construct_ms = done.timings.construct_ms;
                }
                // Of several, each has arrived before.
                if done.embedding.is_some() {
                    self.keep(group, 0, *done);
                }
            }
            _ => {}
        }
        self.left == 0
    }

    fn keep(&mut self, group: usize, choice: usize, done: Done) {
        let begin = self.groups.get(group).map_or(0, |group| group.start);
        if let Some(vector) = self.vectors.get_mut(begin + choice) {
            *vector = done.embedding;
        }
    }

    /// The response, which is written while it is sent: the numbers as text take several times the
    /// memory of the vectors. `total_ns`: time since the request. `None` if a vector is missing.
    pub(super) fn response(
        self,
        format: VectorFormat,
        model: &str,
        (weights, pooling): (WeightsId, Pooling),
        total_ns: u64,
    ) -> Option<Response<Body>> {
        let vectors: Vec<Embedding> = self.vectors.into_iter().collect::<Option<_>>()?;
        let fingerprint = fingerprint(weights, &self.arithmetic);
        let mut about = json!({
            "model": model, "system_fingerprint": fingerprint, "hearthnet_pooling": pooling.name(),
        });
        let (open, close) = match format {
            VectorFormat::Floats | VectorFormat::Base64 => {
                about["object"] = json!("list");
                about["usage"] = json!({"prompt_tokens": self.tokens, "total_tokens": self.tokens});
                (r#","data":["#, "]}")
            }
            VectorFormat::Ollama => {
                about["total_duration"] = json!(total_ns);
                about["load_duration"] = json!((self.construct_ms * 1e6) as u64);
                about["prompt_eval_count"] = json!(self.tokens);
                (r#","embeddings":["#, "]}")
            }
            VectorFormat::OlderOllama => (r#","embedding":"#, "}"),
        };
        let mut head = about.to_string();
        // The list follows the other members.
        head.pop();
        head.push_str(open);
        // A model of Ollama's that is only loaded has no vector.
        if vectors.is_empty() && format == VectorFormat::OlderOllama {
            head.push_str("[]");
        }
        let vectors = vectors.into_iter().enumerate();
        let vectors = vectors.map(move |(index, vector)| {
            let comma = if index > 0 { "," } else { "" };
            format!("{comma}{}", element(format, index, &vector))
        });
        let parts = [head].into_iter().chain(vectors).chain([close.to_owned()]);
        let parts = parts.map(|part| Ok::<_, Infallible>(Bytes::from(part)));
        let kind = (header::CONTENT_TYPE, "application/json");
        Some(([kind], Body::from_stream(stream::iter(parts))).into_response())
    }
}

/// Element of a response's list.
fn element(format: VectorFormat, index: usize, vector: &Embedding) -> String {
    let Embedding(values) = vector;
    // Every f32 is an f64, whose digits are those that readers of either need.
    let floats = || -> Value { values.iter().map(|value| f64::from(*value)).collect() };
    let object = |embedding: Value| {
        json!({"object": "embedding", "index": index, "embedding": embedding}).to_string()
    };
    match format {
        VectorFormat::Floats => object(floats()),
        VectorFormat::Base64 => {
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            object(json!(STANDARD.encode(bytes)))
        }
        VectorFormat::Ollama | VectorFormat::OlderOllama => floats().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields::tests::refusal;
    use super::*;
    use crate::api::fields::tests::cases;
    use crate::api::fields::with;

    fn read(extra: Value) -> Result<EmbeddingsRequest, ApiError> {
        let body = with(json!({"model": "m", "input": "hi"}), extra);
        request(body.to_string().as_bytes())
    }

    #[test]
    fn a_text_or_tokens_or_a_list_of_either_is_read() {
        for (input, count, is_list) in [
            (json!("hi"), 1, false),
            (json!([1, 2, 3]), 1, false),
            (json!(["a", "b"]), 2, true),
            (json!([[1], [2, 3], [4]]), 3, true),
            (json!(vec!["a"; 2048]), 2048, true),
        ] {
            let request = read(json!({"input": input})).unwrap();
            assert_eq!((request.inputs.len(), request.is_list), (count, is_list));
        }
        let request = read(json!({"encoding_format": "base64", "user": "u", "exact": "any"}));
        let request = request.unwrap();
        assert_eq!(request.format, VectorFormat::Base64);
        assert_eq!(
            (request.user.as_str(), request.exact),
            ("u", Some(Exact::Any))
        );
    }

    #[test]
    fn invalid_requests_name_their_field() {
        for (extra, code, param) in cases::<(Value, String, String)>(json!([
            [{"input": null}, "invalid_value", "input"],
            [{"input": ""}, "invalid_value", "input"],
            [{"input": []}, "invalid_value", "input"],
            [{"input": ["a", ""]}, "invalid_value", "input[1]"],
            [{"input": [[1], []]}, "invalid_value", "input[1]"],
            [{"input": ["a", 1]}, "invalid_value", "input"],
            [{"input": [-1]}, "invalid_value", "input"],
            [{"input": {"text": "a"}}, "invalid_value", "input"],
            [{"input": vec!["a"; 2049]}, "invalid_value", "input"],
            [{"model": 1}, "invalid_value", "model"],
            [{"encoding_format": "hex"}, "invalid_value", "encoding_format"],
            [{"dimensions": 0}, "invalid_value", "dimensions"],
            [{"stream": true}, "unsupported_parameter", "stream"],
        ])) {
            assert_eq!(refusal(read(extra)), (code, param));
        }
    }

    #[test]
    fn vectors_have_the_models_dimensions_and_a_bounded_size() {
        let request = read(json!({"input": vec!["a"; 2000]})).unwrap();
        assert_eq!(request.bytes(576).unwrap(), 2000 * 576 * 4);
        let error = request.bytes(4096).unwrap_err().body()["error"].clone();
        assert!(error["message"].as_str().unwrap().contains("at most 1024"));
        let request = read(json!({"dimensions": 576})).unwrap();
        assert!(request.bytes(576).is_ok());
        assert_eq!(refusal(request.bytes(1024)).0, "unsupported_parameter");
    }

    #[test]
    fn groups_have_all_inputs_in_order_and_few_tokens() {
        let inputs = |lengths: &[usize]| -> Vec<Vec<u32>> {
            lengths.iter().map(|&length| vec![0; length]).collect()
        };
        for (lengths, expected) in [
            (&[][..], &[][..]),
            (&[5], &[(0, 1)]),
            (&[512, 1], &[(0, 1), (1, 2)]),
            (&[300, 212, 1], &[(0, 2), (2, 3)]),
            (&[9000, 9000], &[(0, 1), (1, 2)]),
            (&[1, 9000, 1, 1], &[(0, 1), (1, 2), (2, 4)]),
        ] {
            let groups = groups(&inputs(lengths));
            let ends: Vec<_> = groups
                .iter()
                .map(|group| (group.start, group.end))
                .collect();
            assert_eq!(ends, expected, "{lengths:?}");
        }
    }
}
