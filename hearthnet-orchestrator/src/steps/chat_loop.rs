//! The step loop: one thread that drives all running chats, so that work which is ready at the same
//! time is sent and batched together.
//!
//! Chats are futures. The loop polls the chats that were woken (by rows of a host, the result of a
//! batch, a timer, a cancellation). When no chat is ready any more, the loop is at a *boundary*:
//!
//! ```text
//!        ┌──────────────────────────────────────────────────────────────┐
//!        ▼                                                              │
//!  poll the ready chats ───► boundary: write the queued messages, ──────┤ a chat waited in
//!        ▲                   then wake the chats in `boundary`          │ `boundary`
//!        │                                                              │ none did
//!        └───────────────── sleep until a chat is woken ◄───────────────┘
//! ```
//!
//! This has three effects:
//! - Rows that several chats `send` to one host leave as one record, and the host computes them as
//!   one batch.
//! - The leader of a [batch](super::batcher) waits for a boundary, by which every ready chat has
//!   submitted its job, and then briefly for a full batch.
//! - The text of a token is delivered after a boundary, so after the next row has been sent.
//!
//! A chat must not block the loop. Long operations run elsewhere and are awaited: batches of
//! several chats, the search for other hosts, loading a model, a slow reader.
//!
//! A caller that runs one conversation on its own thread has its own loop: `block_on`.

use std::cell::RefCell;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use hearthnet_transport::{Message, SendError, Sender};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// The loop of a lone chat busy-waits from this long before an answer is due. A timer may be late
/// by half of it.
const AWAKE_BEFORE: Duration = Duration::from_micros(150);
/// The busy wait ends this long after the due time.
const AWAKE_AFTER: Duration = Duration::from_micros(100);
/// Answers due later than this are not busy-waited for: it would make no difference.
const LONG_STEP: Duration = Duration::from_millis(50);

thread_local! {
    /// Actions for the next boundary of this thread's loop.
    static NEXT: RefCell<Next> = RefCell::default();
}

#[derive(Default)]
struct Next {
    /// Number of chats on the loop.
    chats: usize,
    /// Sessions with queued messages.
    unwritten: Vec<Sender>,
    /// Wakers of the chats that wait for the boundary.
    behind: Vec<Waker>,
    /// When the answer that a lone chat waits for is due.
    due: Option<Instant>,
}

/// Waits until all ready chats have been polled and their messages have been written.
pub(crate) async fn boundary() {
    let mut passed = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut passed, true) {
            return Poll::Ready(());
        }
        NEXT.with_borrow_mut(|next| next.behind.push(cx.waker().clone()));
        Poll::Pending
    })
    .await;
}

/// Queues a message to be written at the next boundary, in one record with other messages of the
/// session. Returns the message if the send queue is full.
///
/// Only a chat on a loop may call it: outside of one, there is no boundary.
///
/// # Errors
/// As [`Sender::try_send`].
pub(crate) fn send(sender: &Sender, message: Message) -> Result<Option<Message>, SendError> {
    let back = sender.try_queue(message)?;
    NEXT.with_borrow_mut(|next| {
        if !next.unwritten.iter().any(|s| s.is_same_session(sender)) {
            next.unwritten.push(sender.clone());
        }
    });
    Ok(back)
}

/// Sets the time at which the answer for this chat is due. Waking a sleeping core would add latency
/// to each hop and token, so a loop with a single chat is awake by then.
pub(crate) fn expect(due: Instant) {
    NEXT.with_borrow_mut(|next| next.due = Some(due));
}

/// Returns true if this chat is the only one on the loop, so that it may block.
pub(crate) fn is_alone() -> bool {
    NEXT.with_borrow(|next| next.chats <= 1)
}

/// Runs one chat on this thread until its end.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    run(|cx| (future.as_mut().poll(cx), 1))
}

/// Runs one chat as a part of a task, for a program whose chats share their thread with hosts, as
/// in a simulation. Each poll of the task is a turn of a loop of its own.
pub async fn run_in_task<F: Future>(chat: F) -> F::Output {
    let mut chat = pin!(chat);
    let mut own = Next::default();
    poll_fn(|cx| {
        own.chats = 1;
        let outer = NEXT.replace(std::mem::take(&mut own));
        let polled = chat.as_mut().poll(cx);
        own = NEXT.replace(outer);
        own.due = None;
        let (unwritten, behind) = (&mut own.unwritten, &mut own.behind);
        unwritten.drain(..).for_each(|sender| sender.flush());
        behind.drain(..).for_each(Waker::wake);
        polled
    })
    .await
}

/// Handle of a step loop on its own thread. The loop ends with its last chat once all clones of the
/// handle are dropped.
#[derive(Clone)]
pub(crate) struct ChatLoop(mpsc::UnboundedSender<Begin>);

/// Creates a chat on the loop's thread.
type Begin = Box<dyn FnOnce() -> LocalBoxFuture<'static, ()> + Send>;

impl ChatLoop {
    /// Starts the thread. `runtime` provides timers and the threads for long operations.
    pub(crate) fn start(runtime: Handle) -> Self {
        let (begin, mut begins) = mpsc::unbounded_channel::<Begin>();
        let turns = move || {
            let _context = runtime.enter();
            let mut chats = FuturesUnordered::new();
            run(|cx| {
                let mut more = true;
                while more && let Poll::Ready(begun) = begins.poll_recv(cx) {
                    more = begun.is_some();
                    chats.extend(begun.map(|begin| begin()));
                }
                while let Poll::Ready(Some(())) = chats.poll_next_unpin(cx) {}
                let end = match more || !chats.is_empty() {
                    true => Poll::Pending,
                    false => Poll::Ready(()),
                };
                (end, chats.len())
            });
        };
        let thread = thread::Builder::new().name("chat-steps".into());
        if let Err(error) = thread.spawn(turns) {
            // The receiver is dropped, so every `run` returns `None` at once.
            tracing::error!("cannot start the thread for chats: {error}");
        }
        Self(begin)
    }

    /// Runs a chat on the loop and returns its result, or `None` if it panics.
    pub(crate) async fn run<T, F>(&self, chat: impl FnOnce() -> F + Send + 'static) -> Option<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let (end, ended) = oneshot::channel();
        let begin: Begin = Box::new(move || {
            let chat = AssertUnwindSafe(async move { end.send(chat().await) });
            // A panic ends only its own chat; the panic hook has already reported it.
            chat.catch_unwind().map(drop).boxed_local()
        });
        self.0.send(begin).ok()?;
        ended.await.ok()
    }
}

/// Polls until the end. `poll` also returns the number of chats.
fn run<T>(mut poll: impl FnMut(&mut Context<'_>) -> (Poll<T>, usize)) -> T {
    let sleeper = Arc::new(Sleeper {
        thread: thread::current(),
        woken: AtomicBool::new(true),
    });
    let waker = Waker::from(Arc::clone(&sleeper));
    let mut cx = Context::from_waker(&waker);
    // A nested loop has its own boundaries.
    let outer = NEXT.take();
    loop {
        while sleeper.woken.swap(false, Ordering::AcqRel) {
            NEXT.with_borrow_mut(|next| next.due = None);
            let (end, chats) = poll(&mut cx);
            NEXT.with_borrow_mut(|next| next.chats = chats);
            if let Poll::Ready(end) = end {
                // The chats that wait for the boundary have ended.
                let unwritten = NEXT.take().unwritten;
                unwritten.iter().for_each(Sender::flush);
                NEXT.set(outer);
                return end;
            }
        }
        let (unwritten, behind, due) = NEXT.with_borrow_mut(|next| {
            let due = next.due.filter(|_| next.chats == 1);
            let unwritten = std::mem::take(&mut next.unwritten);
            (unwritten, std::mem::take(&mut next.behind), due)
        });
        unwritten.iter().for_each(Sender::flush);
        if behind.is_empty() {
            sleeper.sleep(due);
        }
        behind.into_iter().for_each(Waker::wake);
    }
}

struct Sleeper {
    thread: Thread,
    /// Set when a chat is ready.
    woken: AtomicBool,
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.thread.unpark();
        }
    }
}

impl Sleeper {
    /// Parks until woken; busy-waits around the time when an answer is due.
    fn sleep(&self, due: Option<Instant>) {
        let is_woken = || self.woken.load(Ordering::Acquire);
        if let Some((due, from)) = due.and_then(|due| Some((due, due.checked_sub(AWAKE_BEFORE)?))) {
            let asleep = || from.saturating_duration_since(Instant::now());
            if asleep() <= LONG_STEP {
                while !is_woken() && asleep() > Duration::ZERO {
                    thread::park_timeout(asleep());
                }
                while !is_woken() && Instant::now() < due + AWAKE_AFTER {
                    thread::yield_now();
                }
            }
        }
        while !is_woken() {
            thread::park();
        }
    }
}
