//! API errors of failed requests.

use std::time::Duration;

use axum::http::StatusCode;
use hearthnet_http::{ApiError, OverLimit};
use hearthnet_tokens::grammar::GrammarError;
use hearthnet_transport::Code;

use crate::error::ChatError;
use crate::service::Service;

/// Estimated restart time of a stopping service: running chats end (20 s at most), and a model is
/// loaded.
const BACK_AFTER: Duration = Duration::from_secs(30);

/// Retry delay when the limit on concurrent requests is reached.
pub(super) const CROWDED: Duration = Duration::from_secs(2);

/// API error of a request beyond a limit of its key.
pub(super) fn over_limit(over: &OverLimit, service: &Service) -> ApiError {
    let code = "rate_limit_exceeded";
    metrics::counter!("hearthnet_refusals_total", "code" => code).increment(1);
    let after = match over {
        OverLimit::Tokens { after, .. } => *after,
        _ => service.retry_after(),
    };
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, code, over.to_string()).retry_after(Some(after))
}

/// API error of this server's own failure.
pub(super) fn internal(why: impl Into<String>) -> ApiError {
    failed(&ChatError::Engine(why.into()), None)
}

/// Runs blocking work on a thread for it.
///
/// # Errors
/// The work panicked, or the runtime ends.
pub(super) async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| internal(error.to_string()))
}

/// API error of a failed chat. `after` is the retry delay, used if a retry can help.
pub(super) fn failed(error: &ChatError, after: Option<Duration>) -> ApiError {
    let status = StatusCode::from_u16(error.http_status());
    let code = match error {
        // OpenAI's code: clients react to it by shortening the conversation.
        ChatError::TooLong { .. } => Code::new("context_length_exceeded"),
        ChatError::Grammar(GrammarError::Unsupported(_)) => Code::new("unsupported_parameter"),
        ChatError::Grammar(_) => Code::new("invalid_value"),
        _ => error.code(),
    };
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let made = match error {
        // The words of each API: clients look for them before they shorten a conversation. Among
        // those that look for OpenAI's are LangChain and LiteLLM.
        ChatError::TooLong { tokens, context } => {
            let text = format!(
                "This model's maximum context length is {context} tokens. However, the prompt is \
                 too long: it has {tokens} tokens. Please shorten it."
            );
            let anthropics = format!("prompt is too long: {tokens} tokens > {context} maximum");
            ApiError::new(status, code, text).in_anthropics_words(anthropics)
        }
        error => ApiError::new(status, code, format!("{error}; {}", error.hint())),
    };
    made.retry_after(match error {
        ChatError::Busy(_) | ChatError::HostsFull(_) => after,
        ChatError::ShuttingDown => Some(BACK_AFTER),
        _ => None,
    })
}

/// 429: other requests or responses use the memory for `what`.
pub(super) fn full(what: &str) -> ApiError {
    let why = format!("the memory for {what} is full");
    failed(&ChatError::Busy(why), Some(CROWDED))
}
