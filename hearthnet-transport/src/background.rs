//! Threads that stand back: what strangers and neighbours make this machine do, as handshakes and
//! the checks of what they say, runs below the priority of the sessions that are open. However much
//! of it there is, a step of a chat that is under way goes first.

use std::cell::Cell;
use std::io;
use std::sync::{Arc, LazyLock, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle, Runtime};

/// Niceness of these threads: far above that of a shard host's engine, which is 5 by default.
const NICENESS: i32 = 19;

/// How long such work goes on before others are asked whether they have something to do. A system
/// that has no other core for them might look only after 4 ms.
const TURN: Duration = Duration::from_micros(500);

thread_local! {
    /// Since when this thread has been at work; `None` on threads that do not stand back.
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Where such work is spawned: one thread for tasks, and as many for what blocks as are needed. It
/// has timers; sockets that are used there must have been made elsewhere, and stay with that runtime.
///
/// Where the system gives no thread it is the caller's own runtime.
///
/// # Panics
/// Only in that case, and outside of a runtime.
pub fn background() -> Handle {
    static THREADS: LazyLock<Option<Runtime>> = LazyLock::new(|| {
        threads_can_start(1).ok()?;
        Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .thread_name("background")
            .on_thread_start(|| {
                stand_back(NICENESS);
                SINCE.set(Some(Instant::now()));
            })
            .build()
            .ok()
    });
    match &*THREADS {
        Some(threads) => threads.handle().clone(),
        None => Handle::current(),
    }
}

/// Whether the system gives this process so many threads more. A runtime that gets none panics, so
/// this is asked before one is built.
///
/// # Errors
/// What the system says when it gives fewer.
pub fn threads_can_start(count: usize) -> io::Result<()> {
    let (together, wait) = mpsc::channel::<()>();
    let wait = Arc::new(Mutex::new(wait));
    let mut started = Vec::new();
    let mut outcome = Ok(());
    for _ in 0..count {
        let wait = Arc::clone(&wait);
        let thread = thread::Builder::new().name("probe".into());
        // Each lives until all were started.
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

/// Between two pieces of work of some dozen microseconds each: lets others go first if it is time to.
/// Does nothing on other threads than those of [`background`].
pub fn give_way() {
    if let Some(since) = SINCE.get()
        && since.elapsed() >= TURN
    {
        thread::yield_now();
        SINCE.set(Some(Instant::now()));
    }
}

/// Lowers this thread's priority to a niceness from 0 (not at all) to 19.
pub fn stand_back(niceness: i32) {
    // Elsewhere than on Linux this is about the whole process.
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, niceness) {
        tracing::debug!(%error, "a thread keeps the priority of its process");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = niceness;
}
