//! Runs a chat from its turn to its end.

use std::sync::Arc;
use std::time::Instant;

use hearthnet_transport::Code;

use super::answer::FrameOutput;
use super::choices::{Chat, Numbered};
use super::prefix_cache::{CachedPrefix, Key};
use super::{Inner, Job, Request, ServedModel, State};
use crate::Cancel;
use crate::backend::Backend;
use crate::chat::{Conversation, Done, Frame, Outputs, Prepared};
use crate::error::ChatError;
use crate::exact::Exact;

/// Weight of the newest answer in the moving average behind
/// [`Service::retry_after`](super::Service::retry_after).
const RECENT: f64 = 0.2;

impl CachedPrefix for Conversation {
    fn held(&self) -> &[u32] {
        &self.held
    }

    fn is_alive(&self) -> bool {
        self.backend.is_alive()
    }
}

impl Inner {
    /// Gives a running slot to a chat; [`RunningSlot::start`] must follow once the state is
    /// unlocked.
    pub(super) fn take_slot(self: &Arc<Self>, state: &mut State, job: Job) -> (RunningSlot, Job) {
        let number = state.next;
        state.next += 1;
        let running = (job.cancel.clone(), Instant::now());
        state.running.insert(number, running);
        let slot = RunningSlot {
            inner: Arc::clone(self),
            number,
            identity: job.caller.principal.identity.clone(),
        };
        (slot, job)
    }
}

/// Running slot. Dropping it starts the next chat.
pub(super) struct RunningSlot {
    inner: Arc<Inner>,
    number: u64,
    /// Verified caller of the chat.
    identity: String,
}

impl RunningSlot {
    /// Runs the chat. A runtime that is ending drops both.
    pub(super) fn start(self, job: Job) {
        let runtime = self.inner.runtime.clone();
        runtime.spawn(work(self, job));
    }
}

impl Drop for RunningSlot {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.running.remove(&self.number);
        let next = state.turns.finish(&self.identity);
        let next = next.map(|job| self.inner.take_slot(&mut state, job));
        self.inner.report(&state);
        drop(state);
        if let Some((slot, job)) = next {
            slot.start(job);
        }
    }
}

/// Runs one chat from its turn to its end. If it panics, its caller gets [`ChatError::Engine`].
async fn work(slot: RunningSlot, job: Job) -> Option<()> {
    let (inner, runtime) = (Arc::clone(&slot.inner), slot.inner.runtime.clone());
    let began = Instant::now();
    metrics::histogram!("hearthnet_queue_wait_seconds").record(began - job.asked);
    let beginning = runtime.spawn_blocking(move || {
        let begun = begin(&inner, &job);
        (inner, job, begun)
    });
    let (inner, job, begun) = beginning.await.ok()?;
    // Vectors are made of whole texts: nothing would continue their conversation.
    let key = (!job.embeds()).then(|| job.key());
    let (end, cancel) = (job.end, job.cancel);
    let mut output = FrameOutput::new(job.frames, cancel.clone(), inner.settings.slow_reader, 0);
    let result = match begun {
        Err(error) => Err(error),
        Ok((conversation, first, others)) => {
            let chat = Chat {
                inner: Arc::clone(&inner),
                model: Arc::clone(&job.model),
                started: job.asked,
            };
            let (conversation, back, result) = match (others.is_empty(), first.outputs) {
                (true, _) => chat.one(conversation, output, first).await?,
                (false, Outputs::Embedding) => {
                    chat.in_turn(conversation, output, first, others).await?
                }
                (false, _) => chat.several(conversation, output, first, others).await?,
            };
            output = back;
            let inner = Arc::clone(&inner);
            let storing = runtime.spawn_blocking(move || {
                store_in_prefix_cache(&inner, key, conversation, &result);
                result
            });
            storing.await.ok()?
        }
    };
    let code = result
        .as_ref()
        .map_or_else(ChatError::code, |_| Code::new("ok"));
    metrics::counter!("hearthnet_answers_total", "code" => code).increment(1);
    {
        let took_ms = began.elapsed().as_secs_f64() * 1e3;
        let mut state = inner.lock();
        let average = state.answer_ms.unwrap_or(took_ms);
        state.answer_ms = Some(average + (took_ms - average) * RECENT);
    }
    // The next chat need not wait for this one's reader.
    drop(slot);
    let result = match result {
        Ok(done) => {
            output.backlog.push_back(Frame::Done(Box::new(done)));
            output.empty().await;
            // If frames were dropped, the answer must not look complete.
            match cancel.is_cancelled() {
                true => Err(ChatError::Cancelled),
                false => Ok(()),
            }
        }
        Err(error) => Err(error),
    };
    // The reader must see the closed channel before the result.
    drop(output);
    // The reader may be gone.
    end.send(result).ok()
}

/// Prepares the answers and their conversation, from the cache or new. Blocks.
fn begin(inner: &Inner, job: &Job) -> Result<(Conversation, Prepared, Numbered), ChatError> {
    if job.cancel.is_cancelled() {
        return Err(ChatError::Cancelled);
    }
    let model = &job.model;
    let mut prepared: Numbered = match &job.request {
        Request::Chat(request) => (0..request.options.choices)
            .map(|index| Ok((index, Prepared::new(&model.text, &request.choice(index))?)))
            .collect::<Result<_, ChatError>>()?,
        Request::Embed(request) => (0..)
            .zip(&request.inputs)
            .map(|(index, ids)| Ok((index, Prepared::embedding(&model.text, ids)?)))
            .collect::<Result<_, ChatError>>()?,
    };
    let Some((_, first)) = prepared.pop_front() else {
        return Err(ChatError::BadRequest("there is nothing to answer".into()));
    };
    let key = job.key();
    let taken = match first.outputs {
        Outputs::Last => inner.lock().kept.take(&key, &first.prompt),
        // All of the prompt is computed.
        Outputs::Logprobs | Outputs::Embedding => None,
    };
    let conversation = match taken {
        Some(conversation) => conversation,
        None => Conversation::new(open(inner, model, key.exact, &job.cancel)?),
    };
    Ok((conversation, first, prepared))
}

/// Stores a conversation for its next turn, if it has a key. Else drops it, which may wait for an
/// engine. The last frame is sent afterwards, so that an immediate next turn finds the conversation.
fn store_in_prefix_cache(
    inner: &Inner,
    key: Option<Key>,
    conversation: Conversation,
    result: &Result<Done, ChatError>,
) {
    let Ok(Done { usage, .. }) = result else {
        return;
    };
    for (kind, count) in [
        ("prompt", usage.prompt_tokens),
        ("cached", usage.cached_tokens),
        ("completion", usage.completion_tokens),
    ] {
        metrics::counter!("hearthnet_tokens_total", "kind" => kind).increment(count.into());
    }
    let mut state = inner.lock();
    let over = match key.filter(|_| !state.draining) {
        None => vec![conversation],
        Some(key) => {
            let now = inner.now_ms();
            state.kept.put(key, conversation, now)
        }
    };
    inner.report(&state);
    drop(state);
    drop(over);
}

/// Opens a backend; idle conversations are evicted until there is room.
fn open(
    inner: &Inner,
    model: &ServedModel,
    exact: Exact,
    cancel: &Cancel,
) -> Result<Box<dyn Backend>, ChatError> {
    loop {
        match (model.open)(exact, cancel) {
            Err(
                error @ (ChatError::ShardUnavailable(_)
                | ChatError::Busy(_)
                | ChatError::HostsFull(_)),
            ) => {
                let oldest = inner.lock().kept.take_oldest();
                match oldest {
                    Some(oldest) => drop(oldest),
                    None => return Err(error),
                }
            }
            result => return result,
        }
    }
}
