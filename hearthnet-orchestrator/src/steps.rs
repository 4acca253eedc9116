//! The step loop: one thread that takes all running chats forward, so that what is ready at the
//! same time goes on together.
//!
//! Chats are futures. The loop polls those for which something has come (rows of a host, the
//! results of a batch, a timer, a cancellation), and when nothing is ready any more it is at a
//! *boundary*:
//!
//! ```text
//!        ┌──────────────────────────────────────────────────────────────┐
//!        ▼                                                              │
//!  poll whoever is ready ─► boundary: write what was sent meanwhile, ───┤ somebody goes on
//!        ▲                  then wake those who wait in `boundary`      │
//!        │                                                              │ nobody
//!        └───────────────── sleep until something comes ◄───────────────┘
//! ```
//!
//! What follows from that, without a timed wait:
//! - Rows that several chats `send` to one host leave as one record, and the host computes them
//!   as one batch.
//! - Whoever gathers a [batch](crate::batcher) waits for a boundary: by then everybody who was
//!   ready has said what it wants.
//! - A token's text finds its reader behind a boundary, so after the next row is on its way.
//!
//! Nothing that a chat does on the loop may take long. What does is done elsewhere and waited for:
//! batches of several chats, the search for other hosts, loading a model, a slow reader.
//!
//! A caller that runs one conversation on its own thread has a loop of its own: `block_on`.

use std::cell::RefCell;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use hearthnet_transport::{Message, SendError, Sender};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

/// How long before an answer is due the loop of a lone chat is awake. A timer may be late by half
/// of it.
const AWAKE_BEFORE: Duration = Duration::from_micros(150);
/// How long after that it goes to sleep again.
const AWAKE_AFTER: Duration = Duration::from_micros(100);
/// What is due later than this is not waited for awake: it would make no difference.
const LONG_STEP: Duration = Duration::from_millis(50);

thread_local! {
    /// What happens at the next boundary of this thread's loop.
    static NEXT: RefCell<Next> = RefCell::default();
}

#[derive(Default)]
struct Next {
    /// Chats of the loop.
    chats: usize,
    /// Sessions in which messages wait to be written.
    unwritten: Vec<Sender>,
    /// Those who go on behind the boundary.
    behind: Vec<Waker>,
    /// When an answer is due that a lone chat waits for.
    due: Option<Instant>,
}

/// Waits until all chats that are ready have been polled and what they sent has been written.
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

/// Sends at the next boundary, in one piece with what others send in the same session; gives the
/// message back where there is no room for it.
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

/// Says when the answer that this chat waits for is due. To be woken by it would cost the time that
/// a sleeping core takes to come back, once per hop and token; so a loop that has nothing else to
/// do is awake by then.
pub(crate) fn expect(due: Instant) {
    NEXT.with_borrow_mut(|next| next.due = Some(due));
}

/// Whether nobody else is on this loop: what this chat does holds nobody up.
pub(crate) fn is_alone() -> bool {
    NEXT.with_borrow(|next| next.chats <= 1)
}

/// Runs one chat on this thread until its end.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    run(|cx| (future.as_mut().poll(cx), 1))
}

/// A step loop on a thread of its own, which ends with the last chat once this is dropped. Clones
/// are the same.
#[derive(Clone)]
pub(crate) struct Steps(mpsc::UnboundedSender<Begin>);

/// Makes a chat, on the loop's thread.
type Begin = Box<dyn FnOnce() -> LocalBoxFuture<'static, ()> + Send>;

impl Steps {
    /// `runtime` has the timers and the threads for what takes long.
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
            // Then nobody hears of chats, and each ends at once.
            tracing::error!("the system gives no thread for chats: {error}");
        }
        Self(begin)
    }

    /// Runs a chat on the loop. What it comes to; nothing if it panics.
    pub(crate) async fn run<T, F>(&self, chat: impl FnOnce() -> F + Send + 'static) -> Option<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let (end, ended) = oneshot::channel();
        let begin: Begin = Box::new(move || {
            let chat = AssertUnwindSafe(async move { end.send(chat().await) });
            // A defect is the end of its own chat only; the panic itself has been told.
            chat.catch_unwind().map(drop).boxed_local()
        });
        self.0.send(begin).ok()?;
        ended.await.ok()
    }
}

/// Polls until the end. `poll` says as well how many chats there are.
fn run<T>(mut poll: impl FnMut(&mut Context<'_>) -> (Poll<T>, usize)) -> T {
    let sleeper = Arc::new(Sleeper {
        thread: thread::current(),
        woken: AtomicBool::new(true),
    });
    let waker = Waker::from(Arc::clone(&sleeper));
    let mut cx = Context::from_waker(&waker);
    // A loop inside of another has boundaries of its own.
    let outer = NEXT.take();
    loop {
        while sleeper.woken.swap(false, Ordering::AcqRel) {
            NEXT.with_borrow_mut(|next| next.due = None);
            let (end, chats) = poll(&mut cx);
            NEXT.with_borrow_mut(|next| next.chats = chats);
            if let Poll::Ready(end) = end {
                // Those who wait for the boundary are gone.
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

/// A loop's thread.
struct Sleeper {
    thread: Thread,
    /// Somebody is ready.
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
    /// Sleeps until it is woken, awake around the time when an answer is due.
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
