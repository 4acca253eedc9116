//! The one path to an answer: every interface (HTTP, the bus, the command line) asks here.
//!
//! | concept | where |
//! |---|---|
//! | whose turn it is | [`fair_queue`] (pure) |
//! | who was refused, and is next when it comes back | [`retries`] (pure) |
//! | conversations that wait for their next turn | [`prefix_cache`] (pure) |
//! | how long a chat waits for its reader | `slow_reader.rs` (pure) |
//! | asking, running, giving up | here |
//!
//! ```text
//! ask --> FairQueue --> (waits) --> a blocking thread: check the request, take a kept
//!   |                               conversation over or open a backend
//!   |                               the step loop of all chats: answer
//!   v                               a blocking thread: keep the conversation, pass the turn on
//! Answer <-- bounded channel <-- frames
//! ```
//!
//! Dropping an [`Answer`] gives it up: what waits leaves the queue, what runs ends at its next
//! step and frees what it has on every host. A reader that is slow slows its own chat only; one
//! that takes nothing for [`ServiceSettings::slow_reader`] is given up for.

pub mod fair_queue;
pub mod prefix_cache;
pub mod retries;
mod slow_reader;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_model::WeightsId;
use hearthnet_transport::Code;
use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

use self::fair_queue::{Entry, FairQueue, QueueLimits, Refused, Ticket, who_of};
use self::prefix_cache::{Key, PrefixCache, PrefixCacheLimits};
use self::retries::{Mark, Retries, Room};
use self::slow_reader::SlowReaderLimit;
use crate::Cancel;
use crate::backend::Backend;
use crate::chat::{Call, ChatRequest, Conversation, Done, Frame, Listener, Prepared, TextModel};
use crate::error::ChatError;
use crate::exact::Exact;
use crate::steps::Steps;
use crate::times::whole_ms;

/// Frames that a chat may be ahead of its reader.
const FRAMES_AHEAD: usize = 64;

/// How much the last answer weighs in the mean that [`Service::retry_after`] is made of.
const RECENT: f64 = 0.2;

/// How long [`Service::drain`] waits for chats that it has cancelled.
const CANCEL_DEADLINE: Duration = Duration::from_secs(2);

/// How much is served at once.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // Built with `..ServiceSettings::default()`.
pub struct ServiceSettings {
    /// Chats that run and wait.
    pub turns: QueueLimits,
    /// Conversations that are kept for their next turn.
    pub keep: PrefixCacheLimits,
    /// A reader that takes nothing for so long is given up for, and so is one that keeps its chat
    /// waiting for so long in sum, and takes next to nothing.
    pub slow_reader: Duration,
}

impl Default for ServiceSettings {
    fn default() -> Self {
        Self {
            turns: QueueLimits {
                places: 4,
                waiting: 32,
                waiting_per_caller: 16,
                reserved: 1,
            },
            keep: PrefixCacheLimits {
                count: 4,
                idle_ms: 300_000,
                // Fewer are run in less time than it takes to ask.
                min_prefix: 8,
            },
            slow_reader: Duration::from_secs(30),
        }
    }
}

/// Makes a backend for a new conversation with one model: over hosts that are chosen by [`Exact`], or on
/// this machine, which is exact. Blocks; ends soon once [`Cancel`] is set.
/// [`ChatError::ShardUnavailable`], [`ChatError::HostsFull`] and [`ChatError::Busy`] say that there is no
/// room: the service then gives up a conversation that it keeps, and asks again.
pub type Opener = Box<dyn Fn(Exact, &Cancel) -> Result<Box<dyn Backend>, ChatError> + Send + Sync>;

/// A model that the service answers with.
pub struct ServedModel {
    /// What callers name it by.
    pub id: String,
    /// Identity of its weights.
    pub weights: WeightsId,
    /// Everything except the blocks.
    pub text: TextModel,
    /// The blocks.
    pub open: Opener,
    /// What hosts are chosen by where the caller does not say.
    pub exact: Exact,
}

/// Who asks.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // Made by every interface.
pub struct Caller {
    /// By which it shares fairly with others. In front of a NUL, if there is one, it says who asks for
    /// certain, and behind it whom for: there it may say what it likes.
    pub name: String,
    /// By which its kept conversations are told from those of others.
    pub held_by: String,
}

impl From<&str> for Caller {
    fn from(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            held_by: name.to_owned(),
        }
    }
}

/// What goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Chats that run.
    pub running: usize,
    /// Chats that wait for a turn.
    pub waiting: usize,
    /// Conversations kept for their next turn.
    pub kept: usize,
    /// Whether no more chats are taken.
    pub draining: bool,
}

/// Answers chats. Clones are the same service.
#[derive(Clone)]
pub struct Service(Arc<Inner>);

struct Inner {
    runtime: Handle,
    /// Where chats run.
    steps: Steps,
    settings: ServiceSettings,
    models: Vec<Arc<ServedModel>>,
    state: Mutex<State>,
    /// Chats that run or wait.
    active: watch::Sender<usize>,
    began: Instant,
    /// Tells requests apart; nobody can make two that it takes for one.
    digests: RandomState,
}

/// A request that was refused at once.
#[derive(Debug)]
#[non_exhaustive]
pub struct Refusal {
    /// The error that the caller gets.
    pub error: ChatError,
    /// When to ask again, if that could help. Whoever does comes before those who ask for the first
    /// time.
    pub retry_after: Option<Duration>,
}

struct State {
    turns: FairQueue<Job>,
    returns: Retries,
    /// By number, to give them up, and whose they are.
    running: BTreeMap<u64, (Cancel, String)>,
    next: u64,
    kept: PrefixCache<Conversation>,
    draining: bool,
    /// Mean time of recent answers.
    answer_ms: f64,
}

/// A chat on its way.
struct Job {
    caller: Caller,
    model: Arc<ServedModel>,
    request: ChatRequest,
    cancel: Cancel,
    frames: mpsc::Sender<Frame>,
    end: oneshot::Sender<Result<(), ChatError>>,
    asked: Instant,
}

impl Job {
    /// Which kept conversations it may take over, and is kept as.
    fn key(&self) -> Key {
        Key {
            caller: self.caller.held_by.clone(),
            model: self.model.id.clone(),
            exact: self.request.exact.unwrap_or(self.model.exact),
        }
    }
}

impl Service {
    /// A service for some models, whose chats run on one loop (`steps.rs`).
    pub fn new(runtime: Handle, models: Vec<ServedModel>, settings: ServiceSettings) -> Self {
        let inner = Arc::new(Inner {
            state: Mutex::new(State {
                turns: FairQueue::new(settings.turns),
                returns: Retries::default(),
                running: BTreeMap::new(),
                next: 0,
                kept: PrefixCache::new(settings.keep),
                draining: false,
                answer_ms: 0.0,
            }),
            models: models.into_iter().map(Arc::new).collect(),
            active: watch::Sender::new(0),
            began: Instant::now(),
            digests: RandomState::new(),
            steps: Steps::start(runtime.clone()),
            runtime,
            settings,
        });
        inner.runtime.spawn(expire(Arc::downgrade(&inner)));
        Self(inner)
    }

    /// The models, in the order in which they were given.
    pub fn models(&self) -> &[Arc<ServedModel>] {
        &self.0.models
    }

    /// The model of this id.
    pub fn model(&self, id: &str) -> Option<&Arc<ServedModel>> {
        self.0.models.iter().find(|model| model.id == id)
    }

    /// What goes on.
    pub fn load(&self) -> Load {
        let state = self.0.lock();
        Load {
            running: state.turns.running(),
            waiting: state.turns.waiting(),
            kept: state.kept.len(),
            draining: state.draining,
        }
    }

    /// When a caller that was refused with [`ChatError::Busy`] may hope for a turn: a guess from
    /// how long recent answers took. 1 to 60 s.
    pub fn retry_after(&self) -> Duration {
        let state = self.0.lock();
        state.until_turns(state.turns.waiting() + 1)
    }

    /// Remembers a request that found no room after its turn had come, and says when to come back.
    pub fn remember(&self, caller: &str, mark: &Mark) -> Duration {
        let mut state = self.0.lock();
        let (now, after) = (self.0.now_ms(), state.until_turns(1));
        let due = now.saturating_add(whole_ms(after));
        state.returns.remember(caller, mark, now, due);
        after
    }

    /// What tells a request from others, where its refused caller comes back with it.
    pub fn digest(&self, request: &[u8]) -> u64 {
        self.0.digests.hash_one(request)
    }

    /// Asks for an answer. `caller` is who shares fairly with others, and whose conversations are
    /// kept apart from theirs. Returns at once; the answer comes as frames.
    ///
    /// # Errors
    /// [`ChatError::BadRequest`] for an unknown model, [`ChatError::Busy`] when too many wait
    /// already, [`ChatError::ShuttingDown`]. Everything else is an outcome of the answer.
    pub fn ask(
        &self,
        caller: &str,
        model: &str,
        request: ChatRequest,
    ) -> Result<Answer, ChatError> {
        let asked = self.ask_as(&caller.into(), &Mark::default(), model, request);
        asked.map_err(|refusal| refusal.error)
    }

    /// The same for a request that is known again when its caller was refused and comes back.
    ///
    /// # Errors
    /// As for [`Self::ask`], with when to come back.
    pub fn ask_as(
        &self,
        caller: &Caller,
        mark: &Mark,
        model: &str,
        request: ChatRequest,
    ) -> Result<Answer, Refusal> {
        let Some(model) = self.model(model).cloned() else {
            return Err(refused(ChatError::BadRequest(format!(
                "there is no model {model:?} here"
            ))));
        };
        let (frames, incoming) = mpsc::channel(FRAMES_AHEAD);
        let (end, ended) = oneshot::channel();
        let cancel = Cancel::default();
        let mut answer = Answer {
            service: Arc::downgrade(&self.0),
            cancel: cancel.clone(),
            ticket: None,
            frames: incoming,
            end: Some(ended),
        };
        let job = Job {
            caller: caller.clone(),
            model,
            request,
            cancel,
            frames,
            end,
            asked: Instant::now(),
        };
        let mut state = self.0.lock();
        if state.draining {
            return Err(refused(ChatError::ShuttingDown));
        }
        let (mut run, now) = (None, self.0.now_ms());
        let limits = self.0.settings.turns;
        state.admit(limits, &caller.name, mark, now)?;
        let others = runs(&state.running, &caller.name);
        match state.turns.enter(&caller.name, others, job) {
            Entry::Run(job) => run = Some(self.0.place(&mut state, job)),
            Entry::Wait(ticket) => answer.ticket = Some(ticket),
            Entry::Full(why) => return Err(state.refuse(limits, why, None)),
        }
        self.0.report(&state);
        drop(state);
        if let Some((place, job)) = run {
            place.start(job);
        }
        Ok(answer)
    }

    /// Takes no more chats, and returns when all have ended; those that have not after `deadline`
    /// are given up. Kept conversations are given up at once.
    pub async fn drain(&self, deadline: Duration) {
        let kept = {
            let mut state = self.0.lock();
            state.draining = true;
            state.kept.clear()
        };
        self.0.discard(kept);
        let mut active = self.0.active.subscribe();
        // The sender lives as long as this service does, so waiting ends only as it should.
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
            state.returns.clear();
            state
                .running
                .values()
                .for_each(|(cancel, _)| cancel.cancel());
            self.0.report(&state);
            waiting
        };
        for job in waiting {
            // Whoever asked may be gone.
            let _ = job.end.send(Err(ChatError::ShuttingDown));
        }
        ended(&mut active, CANCEL_DEADLINE).await;
    }
}

/// Whether a chat of this caller runs, whomever it is for.
fn runs(running: &BTreeMap<u64, (Cancel, String)>, caller: &str) -> bool {
    running.values().any(|(_, who)| who == who_of(caller))
}

impl State {
    /// Lets a request in, or remembers that it was refused.
    fn admit(
        &mut self,
        limits: QueueLimits,
        caller: &str,
        mark: &Mark,
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let (turns, running) = (&self.turns, &self.running);
        let left = limits.waiting.saturating_sub(turns.waiting());
        let room = |caller: &str| Room {
            idle: turns.has_place(caller, runs(running, caller)) || turns.is_owed(caller),
            all: left,
            own: left.min(turns.room_of(caller)),
        };
        let Err(ahead) = self.returns.admit(caller, mark, now_ms, room) else {
            return Ok(());
        };
        let why = match turns.room_of(caller) == 0 {
            true => Refused::Caller,
            false => Refused::Queue,
        };
        let after = self.until_turns(ahead + 1);
        let due_ms = now_ms.saturating_add(whole_ms(after));
        self.returns.remember(caller, mark, now_ms, due_ms);
        Err(self.refuse(limits, why, Some(after)))
    }

    fn refuse(&self, limits: QueueLimits, why: Refused, after: Option<Duration>) -> Refusal {
        let (running, waiting) = (self.turns.running(), self.turns.waiting());
        let error = ChatError::Busy(match why {
            Refused::Queue if waiting >= limits.waiting => {
                format!("{running} chats run and {waiting} wait, which is as many as may")
            }
            Refused::Queue => format!(
                "{running} chats run and {waiting} wait; the places that are left are for those who \
                 were refused before"
            ),
            Refused::Caller => format!(
                "{running} chats run, and {} of yours wait, which is as many as may",
                limits.waiting_per_caller
            ),
        });
        Refusal {
            retry_after: after.or_else(|| Some(self.until_turns(waiting + 1))),
            ..refused(error)
        }
    }

    /// How long it takes until so many more answers have ended: a guess from how long recent ones
    /// took. 1 to 60 s, whole.
    fn until_turns(&self, answers: usize) -> Duration {
        let rounds = answers as f64 / self.turns.running().max(1) as f64;
        Duration::from_secs_f64((self.answer_ms * rounds / 1e3).ceil().clamp(1.0, 60.0))
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn now_ms(&self) -> u64 {
        whole_ms(self.began.elapsed())
    }

    /// Tells whoever watches how much goes on.
    fn report(&self, state: &State) {
        let (running, waiting) = (state.turns.running(), state.turns.waiting());
        metrics::gauge!("hearthnet_pipelines_running").set(running as f64);
        metrics::gauge!("hearthnet_pipelines_waiting").set(waiting as f64);
        metrics::gauge!("hearthnet_conversations_kept").set(state.kept.len() as f64);
        self.active.send_replace(running + waiting);
    }

    /// Gives a chat its place; [`Place::start`] follows when the state is unlocked.
    fn place(self: &Arc<Self>, state: &mut State, job: Job) -> (Place, Job) {
        let number = state.next;
        state.next += 1;
        let who = who_of(&job.caller.name).to_owned();
        state.running.insert(number, (job.cancel.clone(), who));
        let inner = Arc::clone(self);
        (Place { inner, number }, job)
    }

    /// Drops conversations where waiting for an engine harms nobody.
    fn discard(&self, conversations: Vec<Conversation>) {
        if !conversations.is_empty() {
            self.runtime.spawn_blocking(move || drop(conversations));
        }
    }
}

/// A place among those that run. Dropping it passes it on, whatever became of the chat.
struct Place {
    inner: Arc<Inner>,
    number: u64,
}

impl Place {
    /// Runs the chat. (A runtime that is ending drops it, and the place.)
    fn start(self, job: Job) {
        let runtime = self.inner.runtime.clone();
        runtime.spawn(work(self, job));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.running.remove(&self.number);
        let State { turns, running, .. } = &mut *state;
        let next = turns.finish(|caller| runs(running, caller));
        let next = next.map(|job| self.inner.place(&mut state, job));
        self.inner.report(&state);
        drop(state);
        if let Some((place, job)) = next {
            place.start(job);
        }
    }
}

/// One chat, from its turn to its end. (Where it panics, whoever asked hears of an unexpected end.)
async fn work(place: Place, job: Job) -> Option<()> {
    let (inner, runtime) = (Arc::clone(&place.inner), place.inner.runtime.clone());
    let began = Instant::now();
    metrics::histogram!("hearthnet_queue_wait_ms").record((began - job.asked).as_secs_f64() * 1e3);
    let beginning = runtime.spawn_blocking(move || {
        let begun = begin(&inner, &job);
        (inner, job, begun)
    });
    let (inner, job, begun) = beginning.await.ok()?;
    let key = job.key();
    let (end, cancel) = (job.end, job.cancel);
    let mut outlet = Outlet {
        frames: job.frames,
        behind: VecDeque::new(),
        cancel: cancel.clone(),
        patience: SlowReaderLimit::new(inner.settings.slow_reader),
    };
    let result = match begun {
        Err(error) => Err(error),
        Ok((mut conversation, asked)) => {
            let (model, cancel) = (Arc::clone(&job.model), cancel.clone());
            let chat = async move || {
                let mut call = Call {
                    model: &model.text,
                    started: job.asked,
                    cancel: &cancel,
                    listener: &mut outlet,
                };
                let result = conversation.answer_to(asked, &mut call).await;
                (conversation, outlet, result)
            };
            let (conversation, back, result) = inner.steps.run(chat).await?;
            outlet = back;
            let inner = Arc::clone(&inner);
            let putting_away = runtime.spawn_blocking(move || {
                put_away(&inner, key, conversation, &result);
                result
            });
            putting_away.await.ok()?
        }
    };
    let code = result
        .as_ref()
        .map_or_else(ChatError::code, |_| Code::new("ok"));
    metrics::counter!("hearthnet_answers_total", "code" => code).increment(1);
    {
        let took_ms = began.elapsed().as_secs_f64() * 1e3;
        let mut state = inner.lock();
        state.answer_ms += (took_ms - state.answer_ms) * RECENT;
    }
    // The next chat need not wait for this one's reader.
    drop(place);
    let result = match result {
        Ok(done) => {
            outlet.behind.push_back(Frame::Done(Box::new(done)));
            outlet.empty().await;
            // Whoever misses frames must not take the answer for complete.
            match cancel.is_cancelled() {
                true => Err(ChatError::Cancelled),
                false => Ok(()),
            }
        }
        Err(error) => Err(error),
    };
    // The channel must be closed before its end is told.
    drop(outlet);
    // Whoever asked may be gone.
    end.send(result).ok()
}

/// A conversation for a request, whose prompt becomes tokens. Blocks.
fn begin(inner: &Inner, job: &Job) -> Result<(Conversation, Prepared), ChatError> {
    if job.cancel.is_cancelled() {
        return Err(ChatError::Cancelled);
    }
    let model = &job.model;
    let asked = Prepared::new(&model.text, &job.request)?;
    let key = job.key();
    let taken = inner.lock().kept.take(&key, &asked.prompt);
    let conversation = match taken {
        Some(conversation) => conversation,
        None => Conversation::new(open(inner, model, key.exact, &job.cancel)?),
    };
    Ok((conversation, asked))
}

/// Keeps a conversation for its next turn, or ends it, which may have to wait for an engine. The
/// last frame follows, so that a caller who asks again at once finds its conversation kept.
fn put_away(inner: &Inner, key: Key, conversation: Conversation, result: &Result<Done, ChatError>) {
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
    let over = if state.draining {
        vec![conversation]
    } else {
        let now = inner.now_ms();
        state.kept.put(key, conversation, now)
    };
    inner.report(&state);
    drop(state);
    drop(over);
}

/// A new backend; conversations that are only kept make room for it.
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

/// Where a chat's frames go.
struct Outlet {
    frames: mpsc::Sender<Frame>,
    /// What the reader has had no room for.
    behind: VecDeque<Frame>,
    cancel: Cancel,
    patience: SlowReaderLimit,
}

impl Listener for Outlet {
    fn hear(&mut self, frame: &Frame) {
        // The last one follows when the conversation is put away.
        if !matches!(frame, Frame::Done(_)) {
            self.behind.push_back(frame.clone());
            self.fill();
        }
    }

    fn caught_up(&mut self) -> LocalBoxFuture<'_, ()> {
        self.empty().boxed_local()
    }
}

impl Outlet {
    /// Hands on what there is room for.
    fn fill(&mut self) {
        while !self.behind.is_empty()
            && let Ok(room) = self.frames.try_reserve()
        {
            if let Some(frame) = self.behind.pop_front() {
                room.send(frame);
            }
            self.patience.taken_after(Duration::ZERO);
        }
    }

    /// Hands everything on, and waits while the reader is behind. Gives the chat up when the reader
    /// is gone, or takes nothing.
    async fn empty(&mut self) {
        loop {
            self.fill();
            if self.behind.is_empty() || self.cancel.is_cancelled() {
                return;
            }
            let since = Instant::now();
            let room = tokio::select! {
                room = self.frames.reserve() => room.ok().map(drop),
                () = self.cancel.cancelled() => None,
                () = tokio::time::sleep(self.patience.left()) => {
                    tracing::warn!("a reader takes next to nothing: its chat is given up");
                    None
                }
            };
            self.patience.taken_after(since.elapsed());
            // The room is free again, for the frame that has waited.
            if room.is_none() {
                self.cancel.cancel();
            }
        }
    }
}

/// Gives up conversations that have been kept for too long, for as long as there is a service.
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

fn refused(error: ChatError) -> Refusal {
    metrics::counter!("hearthnet_refusals_total", "code" => error.code()).increment(1);
    Refusal {
        error,
        retry_after: None,
    }
}

/// An answer as it comes. Dropping it gives the chat up.
pub struct Answer {
    service: Weak<Inner>,
    cancel: Cancel,
    ticket: Option<Ticket>,
    frames: mpsc::Receiver<Frame>,
    /// `None` once the end has been told.
    end: Option<oneshot::Receiver<Result<(), ChatError>>>,
}

impl Answer {
    /// The next frame; [`Frame::Done`] is the last of an answer that is complete. An error ends an
    /// answer that is not. `None` follows either. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Result<Frame, ChatError>> {
        if let Some(frame) = self.frames.recv().await {
            return Some(Ok(frame));
        }
        let result = self.end.as_mut()?.await;
        self.end = None;
        match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Err(error)),
            // The thread that answered is gone without a word.
            Err(_) => Some(Err(ChatError::Engine("the chat ended unexpectedly".into()))),
        }
    }

    /// Gives the chat up without dropping the answer; it ends with [`ChatError::Cancelled`].
    pub fn cancel(&self) {
        self.cancel.cancel();
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let (Some(ticket), Some(inner)) = (self.ticket, self.service.upgrade()) {
            let mut state = inner.lock();
            let job = state.turns.leave(ticket);
            inner.report(&state);
            drop(state);
            drop(job);
        }
    }
}
