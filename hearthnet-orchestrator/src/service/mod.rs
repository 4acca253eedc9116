//! Queueing and execution of chats. Every interface (HTTP, bus, command line) uses it.
//!
//! | concept | where |
//! |---|---|
//! | order of waiting chats | [`fair_queue`] (pure) |
//! | idle conversations kept for their next turn | [`prefix_cache`] (pure) |
//! | how long a chat waits for a slow reader | `slow_reader.rs` (pure) |
//! | a chat from its turn to its end | `run.rs` |
//! | one or several answers of a chat on the step loop, and vectors of texts | `choices.rs` |
//! | frames of an answer, and their reader | `answer.rs` |
//! | queueing, refusing, cancelling, draining | here |
//!
//! ```text
//! ask --> FairQueue --> (waits) --> a blocking thread: check the request, take over an idle
//!   |                               conversation or open a backend
//!   |                               the step loop of all chats: answer
//!   v                               a blocking thread: store the conversation, free the slot
//! Answer <-- bounded channel <-- frames
//! ```
//!
//! Dropping an [`Answer`] cancels the chat: a waiting one leaves the queue, a running one ends at
//! its next step and releases its streams. A slow reader delays only its own chat. If it takes
//! nothing for [`ServiceSettings::slow_reader`], its chat is cancelled.

mod answer;
mod choices;
pub mod fair_queue;
pub mod prefix_cache;
mod run;
mod slow_reader;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use hearthnet_files::{ModelFile, WeightsId};
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

pub use self::answer::Answer;
use self::answer::Wait;
use self::fair_queue::{Entry, FairQueue, Principal, QueueLimits, Refused, Ticket};
use self::prefix_cache::{Key, PrefixCache, PrefixCacheLimits};
use crate::Cancel;
use crate::backend::Backend;
use crate::chat::{ChatRequest, Conversation, EmbedRequest, Frame, TextModel};
use crate::error::ChatError;
use crate::exact::Exact;
use crate::steps::chat_loop::ChatLoop;
use crate::times::whole_ms;

/// Capacity of the channel between a chat and its reader.
const FRAMES_AHEAD: usize = 64;

/// How long [`Service::drain`] waits for cancelled chats.
const CANCEL_DEADLINE: Duration = Duration::from_secs(2);

/// Limits of a service.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // Built with `..ServiceSettings::default()`.
pub struct ServiceSettings {
    /// Running and waiting chats.
    pub turns: QueueLimits,
    /// Longest time for which a chat waits for its turn.
    pub longest_wait: Duration,
    /// Idle conversations.
    pub keep: PrefixCacheLimits,
    /// A chat is cancelled if its reader takes nothing for this long, or delays it this long in
    /// total and takes almost nothing.
    pub slow_reader: Duration,
}

impl Default for ServiceSettings {
    fn default() -> Self {
        Self {
            turns: QueueLimits {
                places: 4,
                // As many as there may be HTTP requests: a caller waits in turn, and does not have to
                // come back.
                waiting: 256,
                waiting_per_caller: 64,
                reserved: 1,
            },
            // As long as OpenAI's packages wait for an answer.
            longest_wait: Duration::from_secs(600),
            keep: PrefixCacheLimits {
                count: 4,
                idle_ms: 300_000,
                // Prefilling fewer tokens takes less time than the lookup.
                min_prefix: 8,
            },
            slow_reader: Duration::from_secs(30),
        }
    }
}

/// Opens a backend for a new conversation: on hosts selected by [`Exact`], or on this machine,
/// which is exact. Blocks; returns soon after [`Cancel`] is set. On
/// [`ChatError::ShardUnavailable`], [`ChatError::HostsFull`] and [`ChatError::Busy`], the service
/// evicts an idle conversation and retries.
pub type Opener = Box<dyn Fn(Exact, &Cancel) -> Result<Box<dyn Backend>, ChatError> + Send + Sync>;

/// Model that the service answers with.
pub struct ServedModel {
    /// Id that callers use.
    pub id: String,
    pub weights: WeightsId,
    pub file: Arc<ModelFile>,
    /// Layers that hosts run. This process runs the others for its chats.
    pub hosted: Range<u32>,
    /// Tokenizer, embedding and output head.
    pub text: TextModel,
    /// Opens a backend for the blocks.
    pub open: Opener,
    /// Rule for selecting hosts, if the caller gives none.
    pub exact: Exact,
}

/// Identity of a caller.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // Made by every interface.
pub struct Caller {
    /// Identity for fair queueing.
    pub principal: Principal,
    /// Key of its idle conversations; no other key can take them over.
    pub held_by: String,
}

impl From<&str> for Caller {
    fn from(identity: &str) -> Self {
        Self {
            principal: identity.into(),
            held_by: identity.to_owned(),
        }
    }
}

/// Current load of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    pub running: usize,
    pub waiting: usize,
    /// Idle conversations kept for their next turn.
    pub kept: usize,
    /// True if no more chats are accepted.
    pub draining: bool,
}

/// Answers chats. Clones share one service.
#[derive(Clone)]
pub struct Service(Arc<Inner>);

struct Inner {
    runtime: Handle,
    /// Loop on which chats run.
    chat_loop: ChatLoop,
    settings: ServiceSettings,
    models: RwLock<Vec<Arc<ServedModel>>>,
    state: Mutex<State>,
    /// Number of chats that run or wait.
    active: watch::Sender<usize>,
    began: Instant,
}

struct State {
    turns: FairQueue<Job>,
    /// Running chats by number, with their starts.
    running: BTreeMap<u64, (Cancel, Instant)>,
    next: u64,
    kept: PrefixCache<Conversation>,
    draining: bool,
    /// Moving average of answer times; `None` before the first answer.
    answer_ms: Option<f64>,
}

impl State {
    /// Estimated time until a caller that asks now gets a turn.
    fn turn_after(&self) -> Duration {
        let lasted = self.running.values().map(|(_, since)| since.elapsed());
        let lasted: f64 = lasted.map(|lasted| lasted.as_secs_f64()).sum();
        let lasted = lasted / self.running.len().max(1) as f64;
        // Chats that run longer than earlier ones are the better measure.
        let answer = lasted.max(self.answer_ms.unwrap_or(0.0) / 1e3);
        let rounds = (self.turns.waiting() + 1) as f64 / self.turns.running().max(1) as f64;
        Duration::from_secs_f64((answer * rounds).ceil().clamp(1.0, 60.0))
    }

    /// Error for a request that exceeds a limit.
    fn busy(&self, limit: Refused, limits: QueueLimits) -> ChatError {
        let (running, waiting) = (self.turns.running(), self.turns.waiting());
        ChatError::Busy(match limit {
            Refused::Queue => {
                format!("{running} chats run and {waiting} wait, which is the limit")
            }
            Refused::Caller => format!(
                "{running} chats run, and {} of yours wait, which is the limit",
                limits.waiting_per_caller
            ),
        })
    }
}

/// Request of a caller. Requests for vectors wait and run as chats do.
#[derive(Clone)]
pub enum Request {
    Chat(Box<ChatRequest>),
    /// Vectors of texts. A single vector comes in [`Frame::Done`], several in one
    /// [`Frame::ChoiceDone`] each.
    Embed(EmbedRequest),
}

impl From<ChatRequest> for Request {
    fn from(request: ChatRequest) -> Self {
        Self::Chat(Box::new(request))
    }
}

impl From<EmbedRequest> for Request {
    fn from(request: EmbedRequest) -> Self {
        Self::Embed(request)
    }
}

/// A queued or running chat.
struct Job {
    caller: Caller,
    model: Arc<ServedModel>,
    request: Request,
    cancel: Cancel,
    frames: mpsc::Sender<Frame>,
    end: oneshot::Sender<Result<(), ChatError>>,
    asked: Instant,
}

impl Job {
    /// Key under which its conversation is taken from and put into the prefix cache.
    fn key(&self) -> Key {
        let exact = match &self.request {
            Request::Chat(request) => request.exact,
            Request::Embed(request) => request.exact,
        };
        Key {
            caller: self.caller.held_by.clone(),
            model: self.model.id.clone(),
            exact: exact.unwrap_or(self.model.exact),
        }
    }

    fn embeds(&self) -> bool {
        matches!(self.request, Request::Embed(_))
    }
}

/// Builds the trie of a model's vocabulary on a thread of its own. The first grammar of the model
/// would wait half a second for it. A grammar that comes meanwhile waits for this thread, so its
/// priority is not lowered.
fn prepare_grammars(model: &ServedModel) {
    let tokenizer = model.text.tokenizer.clone();
    let thread = thread::Builder::new().name("grammar-trie".into());
    // Without a thread, the first grammar builds it. An error is that grammar's.
    let _ = thread.spawn(move || tokenizer.grammar_vocabulary().map(drop));
}

impl Service {
    /// Creates a service. Its chats run on one step loop (`chat_loop.rs`).
    pub fn new(runtime: Handle, models: Vec<ServedModel>, settings: ServiceSettings) -> Self {
        models.iter().for_each(prepare_grammars);
        let inner = Arc::new(Inner {
            state: Mutex::new(State {
                turns: FairQueue::new(settings.turns),
                running: BTreeMap::new(),
                next: 0,
                kept: PrefixCache::new(settings.keep),
                draining: false,
                answer_ms: None,
            }),
            models: RwLock::new(models.into_iter().map(Arc::new).collect()),
            active: watch::Sender::new(0),
            began: Instant::now(),
            chat_loop: ChatLoop::start(runtime.clone()),
            runtime,
            settings,
        });
        inner.runtime.spawn(expire(Arc::downgrade(&inner)));
        Self(inner)
    }

    /// The models, the oldest first.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.0.models.read().clone()
    }

    pub fn model(&self, id: &str) -> Option<Arc<ServedModel>> {
        let models = self.0.models.read();
        models.iter().find(|model| model.id == id).cloned()
    }

    /// Adds a model, or replaces the one with the same id.
    pub fn add_model(&self, model: ServedModel) {
        prepare_grammars(&model);
        self.remove_model(&model.id);
        self.0.models.write().push(Arc::new(model));
    }

    /// Removes a model and its idle conversations. Chats that run or wait go on.
    pub fn remove_model(&self, id: &str) {
        self.0.models.write().retain(|model| model.id != id);
        let kept = self.0.lock().kept.remove(|key| key.model == id);
        self.0.discard(kept);
    }

    pub fn load(&self) -> Load {
        let state = self.0.lock();
        Load {
            running: state.turns.running(),
            waiting: state.turns.waiting(),
            kept: state.kept.len(),
            draining: state.draining,
        }
    }

    /// Estimated time until a caller refused with [`ChatError::Busy`] gets a turn, from the times of
    /// recent answers and of those that run: 1 to 60 whole seconds.
    pub fn retry_after(&self) -> Duration {
        self.0.lock().turn_after()
    }

    /// Queues a chat and returns at once; the answer arrives as frames. `caller` is the identity
    /// for fair queueing and for the prefix cache.
    ///
    /// # Errors
    /// [`ChatError::BadRequest`] for an unknown model, [`ChatError::Busy`] if the queue is full,
    /// [`ChatError::ShuttingDown`]. Every other error is reported by the answer.
    pub fn ask(
        &self,
        caller: impl Into<Caller>,
        model: &str,
        request: impl Into<Request>,
    ) -> Result<Answer, ChatError> {
        let asked = self.queue(caller.into(), model, request.into());
        asked.inspect_err(|error| {
            metrics::counter!("hearthnet_refusals_total", "code" => error.code()).increment(1);
        })
    }

    fn queue(&self, caller: Caller, model: &str, request: Request) -> Result<Answer, ChatError> {
        let Some(model) = self.model(model) else {
            let problem = format!("there is no model {model:?} here");
            return Err(ChatError::BadRequest(problem));
        };
        let (frames, incoming) = mpsc::channel(FRAMES_AHEAD);
        let (end, ended) = oneshot::channel();
        let cancel = Cancel::default();
        let mut answer = Answer {
            cancel: cancel.clone(),
            wait: None,
            frames: incoming,
            end: Some(ended),
        };
        let principal = caller.principal.clone();
        let asked = Instant::now();
        let job = Job {
            caller,
            model,
            request,
            cancel,
            frames,
            end,
            asked,
        };
        let mut state = self.0.lock();
        if state.draining {
            return Err(ChatError::ShuttingDown);
        }
        let mut run = None;
        match state.turns.enter(&principal, job) {
            Entry::Run(job) => run = Some(self.0.take_slot(&mut state, job)),
            Entry::Wait(ticket) => {
                let inner = Arc::downgrade(&self.0);
                answer.wait = Some(Wait {
                    until: asked + self.0.settings.longest_wait,
                    leave: Box::new(move || leave(&inner, ticket)),
                });
            }
            Entry::Full(limit) => return Err(state.busy(limit, self.0.settings.turns)),
        }
        self.0.report(&state);
        drop(state);
        if let Some((slot, job)) = run {
            slot.start(job);
        }
        Ok(answer)
    }

    /// Accepts no more chats, drops idle conversations, and returns when all chats have ended.
    /// Chats that still run after `deadline` are cancelled.
    pub async fn drain(&self, deadline: Duration) {
        let kept = {
            let mut state = self.0.lock();
            state.draining = true;
            state.kept.clear()
        };
        self.0.discard(kept);
        let mut active = self.0.active.subscribe();
        // `active` lives as long as `self`, so the wait cannot fail.
        let ended = async |active: &mut watch::Receiver<usize>, limit| {
            tokio::time::timeout(limit, active.wait_for(|n| *n == 0))
                .await
                .is_ok()
        };
        if ended(&mut active, deadline).await {
            return;
        }
        let waiting = {
            let mut state = self.0.lock();
            let waiting = state.turns.clear();
            state
                .running
                .values()
                .for_each(|(cancel, _)| cancel.cancel());
            self.0.report(&state);
            waiting
        };
        for job in waiting {
            // The reader may be gone.
            let _ = job.end.send(Err(ChatError::ShuttingDown));
        }
        ended(&mut active, CANCEL_DEADLINE).await;
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn now_ms(&self) -> u64 {
        whole_ms(self.began.elapsed())
    }

    /// Updates the metrics and `active`.
    fn report(&self, state: &State) {
        let (running, waiting) = (state.turns.running(), state.turns.waiting());
        metrics::gauge!("hearthnet_pipelines_running").set(running as f64);
        metrics::gauge!("hearthnet_pipelines_waiting").set(waiting as f64);
        metrics::gauge!("hearthnet_conversations_kept").set(state.kept.len() as f64);
        self.active.send_replace(running + waiting);
    }

    /// Drops conversations on a blocking thread, since that may wait for an engine.
    fn discard(&self, conversations: Vec<Conversation>) {
        if !conversations.is_empty() {
            self.runtime.spawn_blocking(move || drop(conversations));
        }
    }
}

/// Takes a chat out of the queue, unless it has had its turn. Returns the error for a caller whose
/// chat has waited for too long.
fn leave(inner: &Weak<Inner>, ticket: Ticket) -> Option<ChatError> {
    let inner = inner.upgrade()?;
    let mut state = inner.lock();
    let job = state.turns.leave(ticket)?;
    inner.report(&state);
    drop(state);
    // A caller that has left needs no error, and is not refused.
    if job.cancel.is_cancelled() {
        return None;
    }
    let waited = inner.settings.longest_wait.as_secs();
    let error = ChatError::Busy(format!(
        "it has waited for {waited} s for its turn, which is the limit"
    ));
    metrics::counter!("hearthnet_refusals_total", "code" => error.code()).increment(1);
    Some(error)
}

/// Evicts expired conversations until the service is dropped.
async fn expire(inner: Weak<Inner>) {
    let idle = match inner.upgrade() {
        Some(inner) => Duration::from_millis(inner.settings.keep.idle_ms),
        None => return,
    };
    let every = (idle / 4).clamp(Duration::from_millis(100), Duration::from_secs(30));
    loop {
        tokio::time::sleep(every).await;
        let Some(inner) = inner.upgrade() else {
            return;
        };
        let mut state = inner.lock();
        let expired = state.kept.expire(inner.now_ms());
        if !expired.is_empty() {
            inner.report(&state);
        }
        drop(state);
        inner.discard(expired);
    }
}
