//! Answer as a stream.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::ready;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, header};
use axum::response::IntoResponse as _;
use axum::response::sse::{KeepAlive, Sse};
use futures_util::{StreamExt as _, stream};

use super::errors::failed;
use super::output::{self, Format, Output};
use super::prompts::Answers;
use super::reply;
use super::translate::Part;
use crate::chat::Frame;

/// Interval of keep-alive comments in a silent stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// SSE comment for an answer that this machine continues or makes without hosts. Clients ignore
/// comments.
const ALONE: &str = "no host is available: this machine answers alone";

/// Header with the same meaning, for a response in one piece.
const ANSWERED_BY: HeaderName = HeaderName::from_static("x-hearthnet-answered-by");

/// Returns true if the frame reports that this machine takes over from the hosts.
pub(super) fn answers_alone(frame: &Frame) -> bool {
    matches!(frame, Frame::ShardFailover { host: None, .. })
}

/// Says in a response in one piece that this machine has answered alone.
pub(super) fn mark_alone(response: &mut Response<Body>) {
    let here = HeaderValue::from_static("this-machine");
    response.headers_mut().insert(ANSWERED_BY, here);
}

/// Answer as a stream.
pub(super) struct Events {
    answers: Answers,
    output: Output,
    /// Whether comments tell which hosts answer.
    traced: bool,
    /// Parts to send before the next frame is awaited.
    ready: VecDeque<Part>,
    over: bool,
}

impl Events {
    pub(super) fn response(
        answers: Answers,
        (prompt, first): (usize, &Frame),
        output: Output,
        traced: bool,
    ) -> Response<Body> {
        let format = output.format();
        let mut events = Self {
            ready: VecDeque::new(),
            answers,
            output,
            traced,
            over: false,
        };
        events.on_frame(prompt, first);
        let parts = stream::unfold(events, async |mut events| {
            Some((events.next().await?, events))
        });
        match format {
            Format::Events => {
                let events = parts.map(|part| Ok::<_, Infallible>(output::event(part)));
                let alive = KeepAlive::new().interval(KEEP_ALIVE).text("keep-alive");
                Sse::new(events).keep_alive(alive).into_response()
            }
            Format::Lines => {
                let lines = parts.filter_map(|part| ready(output::line(part)));
                let kind = (header::CONTENT_TYPE, "application/x-ndjson");
                ([kind], Body::from_stream(lines)).into_response()
            }
        }
    }

    /// Next part; `None` at the end. Cancel-safe.
    async fn next(&mut self) -> Option<Part> {
        while self.ready.is_empty() && !self.over {
            match self.answers.next().await {
                Ok((prompt, frame)) => self.on_frame(prompt, &frame),
                // An unfinished stream ends with an error, and without the mark of its end.
                Err(error) => {
                    self.over = true;
                    let part = self.output.failed(&failed(&error, None));
                    self.ready.push_back(part);
                }
            }
        }
        self.ready.pop_front()
    }

    /// Queues the parts of a frame of a prompt's answers. Other host events have no place in these
    /// APIs.
    fn on_frame(&mut self, prompt: usize, frame: &Frame) {
        if answers_alone(frame) {
            self.ready.push_back(Part::Comment(ALONE.to_owned()));
        }
        if self.traced
            && let Some(trace) = reply::trace(frame)
        {
            self.ready
                .push_back(Part::Comment(format!("hearthnet {trace}")));
        }
        self.ready.extend(self.output.parts(prompt, frame));
        self.over |= self.output.reply.is_complete();
    }
}
