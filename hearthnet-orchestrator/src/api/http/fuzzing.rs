//! Body of the fuzz target `http_request`, so that tests can replay a fuzzer's findings. Not a public
//! interface.

use hearthnet_http::{ApiError, ErrorFormat};
use hearthnet_transport::is_name;
use serde_json::{Value, json};

use super::embeddings::{self, VectorFormat};
use super::fields::Rules;
use super::reply::Shape;
use super::request;
use super::translate::anthropic::{self, Purpose};
use super::translate::ollama::{self, Asked};
use super::translate::{Stamp, Translated, responses, vllm};

/// Reads bytes as the body of a request of every API. A request of another API than OpenAI's
/// completions is also read after its translation to one of these.
///
/// # Panics
/// If a refusal is no error of the client, has no name, or contains characters unfit for a terminal.
pub fn http_request(body: &[u8]) {
    let stamp = Stamp {
        random: 7,
        created_ms: 1_700_000_000_000,
    };
    let earlier = |_: &str, id: &str| -> Option<Vec<Value>> {
        (id == "resp_1").then(|| vec![json!({"role": "user", "content": "hi"})])
    };
    check(embeddings::request(body));
    check(vllm::tokenize(body));
    check(vllm::detokenize(body));
    for strict in [false, true] {
        let rules = Rules { seed: 1, strict };
        check(request::chat(body, rules));
        check(request::completion(body, rules));
        for format in [VectorFormat::Ollama, VectorFormat::OlderOllama] {
            check(ollama::embed(body, format, rules));
        }
        check(ollama::shown(body, rules));
        for purpose in [Purpose::Answer, Purpose::Count] {
            translated(anthropic::request(body, purpose, stamp, rules), rules);
        }
        translated(responses::request(body, stamp, rules, &earlier), rules);
        for endpoint in [ollama::Endpoint::Chat, ollama::Endpoint::Generate] {
            match ollama::request(body, endpoint, stamp, rules) {
                Ok(Asked::Answer(asked)) => translated(Ok(asked), rules),
                Ok(Asked::Load(..)) => {}
                Err(error) => refused(&error),
            }
        }
    }
}

/// Reads a translated request as its handler does.
fn translated(asked: Result<Translated, ApiError>, rules: Rules) {
    let asked = match asked {
        Ok(asked) => asked,
        Err(error) => return refused(&error),
    };
    let body = asked.request.to_string();
    let read = match asked.shape {
        Shape::Chat => request::chat(body.as_bytes(), rules),
        Shape::Text => request::completion(body.as_bytes(), rules),
    };
    if let Err(error) = read {
        let names = asked.names.iter();
        refused(&names.fold(error, |error, (ours, theirs)| error.renamed(ours, theirs)));
    }
}

fn check<T>(read: Result<T, ApiError>) {
    if let Err(error) = read {
        refused(&error);
    }
}

fn refused(error: &ApiError) {
    let body = error.body();
    let text = |name: &str| body["error"][name].as_str().unwrap_or_default();
    assert_eq!(text("type"), "invalid_request_error", "{body}");
    assert!(is_name(text("code")), "{body}");
    assert!(!text("message").is_empty(), "{body}");
    for name in ["message", "param"] {
        assert!(!text(name).contains(char::is_control), "{body}");
    }
    for format in [ErrorFormat::Anthropic, ErrorFormat::Ollama] {
        assert!(error.body_in(format).is_object());
    }
}
