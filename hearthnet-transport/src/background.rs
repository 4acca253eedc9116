//! Low-priority threads. Work caused by strangers and neighbours (handshakes, checks of their
//! messages) runs below the priority of open sessions, so that a chat's step always goes first.

use std::cell::Cell;
use std::io;
use std::sync::{Arc, LazyLock, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use hearthnet_platform::machine::stand_back;
use tokio::runtime::{Builder, Handle, Runtime, RuntimeFlavor};
use tokio::task::JoinHandle;

/// Niceness of these threads, well above that of a shard host's engine (5 by default).
const NICENESS: i32 = 19;

/// How long such work runs before it yields. Without a free core, the kernel's scheduler might
/// preempt it only after 4 ms.
const TIME_SLICE: Duration = Duration::from_micros(500);

thread_local! {
    /// Start of this thread's time slice; `None` outside of low-priority threads.
    static SLICE_START: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Handle of the low-priority runtime: one thread for tasks, and as many as needed for blocking
/// work. It has timers; sockets used there must be made on another runtime, and stay with it.
///
/// If the system gives no thread, this is the caller's own runtime. On a current-thread runtime it
/// is that one, too: all work of a simulation runs in one order.
///
/// # Panics
/// Only if the system gives no thread, when called outside of a runtime.
pub fn background() -> Handle {
    if let Ok(own) = Handle::try_current()
        && own.runtime_flavor() == RuntimeFlavor::CurrentThread
    {
        return own;
    }
    static THREADS: LazyLock<Option<Runtime>> = LazyLock::new(|| {
        threads_can_start(1).ok()?;
        Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .thread_name("background")
            .on_thread_start(|| {
                stand_back(NICENESS);
                SLICE_START.set(Some(Instant::now()));
            })
            .build()
            .ok()
    });
    match &*THREADS {
        Some(threads) => threads.handle().clone(),
        None => Handle::current(),
    }
}

/// Runs blocking work on a thread of `runtime` for such work. On a current-thread runtime the work
/// is a task, so that all work of a simulation runs in one order.
pub fn run_blocking<T: Send + 'static>(
    runtime: &Handle,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    match runtime.runtime_flavor() {
        RuntimeFlavor::CurrentThread => runtime.spawn(async move { work() }),
        _ => runtime.spawn_blocking(work),
    }
}

/// Checks that the system gives this process `count` more threads. Called before a runtime is
/// built, since a runtime that gets none panics.
///
/// # Errors
/// The system's error when it gives fewer.
pub fn threads_can_start(count: usize) -> io::Result<()> {
    let (together, wait) = mpsc::channel::<()>();
    let wait = Arc::new(Mutex::new(wait));
    let mut started = Vec::new();
    let mut outcome = Ok(());
    for _ in 0..count {
        let wait = Arc::clone(&wait);
        let thread = thread::Builder::new().name("probe".into());
        // Each thread lives until all have been started.
        match thread.spawn(move || drop(wait.lock().map(|wait| wait.recv()))) {
            Ok(thread) => started.push(thread),
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    drop(together);
    for thread in started {
        let _ = thread.join();
    }
    outcome
}

/// Yields to other threads if this thread's time slice is over. For calls between pieces of work of
/// some dozen microseconds; does nothing on threads outside of [`background`].
pub fn give_way() {
    if let Some(since) = SLICE_START.get()
        && since.elapsed() >= TIME_SLICE
    {
        thread::yield_now();
        SLICE_START.set(Some(Instant::now()));
    }
}
