//! Cores that wake quickly while rows go back and forth.
//!
//! A host computes for a millisecond and then waits for the next row, and while it waits its core
//! goes to sleep. Waking up takes from a microsecond to well over a hundred, the deeper the longer,
//! and a virtual machine's core may have to be fetched back from another guest: per hop and token
//! that is more than everything else on the way. Linux can be asked to keep out of the slow kinds of
//! sleep for as long as somebody holds `/dev/cpu_dma_latency` open with a limit in microseconds
//! written to it (PM `QoS`, `Documentation/power/pm_qos_interface.rst` in the kernel's sources).
//! It costs power on all cores, so it is held only while messages are sent, and only in a virtual
//! machine ([`advised`]) or where the owner of the machine has said so.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Where Linux hears of it.
const DEVICE: &str = "/dev/cpu_dma_latency";

/// How long after the last message the limit ends: longer than a step takes anywhere.
const LINGER: Duration = Duration::from_millis(200);

/// Where Linux says what becomes of idle cores.
const IDLE_DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";

/// The limit for whoever has said nothing: 0 in a virtual machine, whose idle cores go back to
/// the machine below and come late from there, whatever the system believes; elsewhere none.
pub fn advised() -> Option<u32> {
    let driver = std::fs::read_to_string(IDLE_DRIVER).ok()?;
    // The driver for guests.
    (driver.trim() == "haltpoll").then_some(0)
}

static KEEPER: OnceLock<Arc<Keeper>> = OnceLock::new();

/// From here on, asks the system for cores that wake within `microseconds` whenever this process
/// has sent a message of a session in the last 200 ms. With 0 cores do not sleep at all meanwhile,
/// which is what a virtual machine needs; 20 keeps a real one out of its deep sleeps. Only the
/// first call counts.
///
/// # Errors
/// Those of opening `/dev/cpu_dma_latency` for writing, which by default only root may, and which
/// is there on Linux only; or the system gives no thread.
pub fn limit(microseconds: u32) -> io::Result<()> {
    let keeper = Keeper::start(Path::new(DEVICE), microseconds, LINGER)?;
    // A second one is dropped: it was never touched, so its thread holds nothing.
    let _ = KEEPER.set(keeper);
    Ok(())
}

/// A message is sent.
pub(crate) fn touch() {
    if let Some(keeper) = KEEPER.get() {
        keeper.touch();
    }
}

/// Holds the limit while it is touched.
#[derive(Debug)]
struct Keeper {
    began: Instant,
    /// When it was touched last, in microseconds since `began`.
    touched: AtomicU64,
    /// Whether the thread has to be woken.
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Keeper {
    fn start(device: &Path, microseconds: u32, linger: Duration) -> io::Result<Arc<Self>> {
        // Whether it is allowed is known from the start, or not at all.
        let limit = i32::try_from(microseconds).unwrap_or(i32::MAX);
        drop(open(device)?);
        let keeper = Arc::new(Self {
            began: Instant::now(),
            touched: AtomicU64::new(0),
            asleep: AtomicBool::new(true),
            thread: OnceLock::new(),
        });
        let (device, own) = (device.to_owned(), Arc::clone(&keeper));
        let thread = thread::Builder::new()
            .name("cpu-latency".into())
            .spawn(move || own.run(&device, limit, linger))?;
        let _ = keeper.thread.set(thread.thread().clone());
        Ok(keeper)
    }

    fn touch(&self) {
        let now = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.touched.store(now, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst)
            && self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    fn idle(&self) -> Duration {
        let touched = Duration::from_micros(self.touched.load(Ordering::SeqCst));
        self.began.elapsed().saturating_sub(touched)
    }

    fn run(&self, device: &Path, limit: i32, linger: Duration) {
        loop {
            while self.asleep.load(Ordering::SeqCst) {
                thread::park();
            }
            match hold(device, limit) {
                Ok(held) => {
                    while let Some(left) = linger.checked_sub(self.idle()) {
                        thread::sleep(left.max(Duration::from_millis(1)));
                    }
                    drop(held);
                }
                Err(error) => {
                    tracing::warn!("cores are left to sleep as they like: {error}");
                    return;
                }
            }
            self.asleep.store(true, Ordering::SeqCst);
            // Whoever touched it before that line has not woken anybody.
            if self.idle() < linger {
                self.asleep.store(false, Ordering::SeqCst);
            }
        }
    }
}

fn open(device: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).open(device)
}

/// The limit ends when the file is closed.
fn hold(device: &Path, limit: i32) -> io::Result<File> {
    let mut file = open(device)?;
    file.write_all(&limit.to_ne_bytes())?;
    Ok(file)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Files stand in for the device: what is written and when it is closed is the same.
    fn is_open(path: &Path) -> bool {
        let files = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
        files
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .any(|target| target == path)
    }

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < Duration::from_secs(60), "never: {what}");
            thread::yield_now();
        }
    }

    #[test]
    fn the_limit_is_held_from_the_first_message_until_some_time_after_the_last() {
        let directory = tempfile::tempdir().unwrap();
        let device = directory.path().canonicalize().unwrap().join("device");
        std::fs::write(&device, "").unwrap();
        let keeper = Keeper::start(&device, 20, Duration::from_millis(30)).unwrap();
        assert!(!is_open(&device) && std::fs::read(&device).unwrap().is_empty());
        for _ in 0..3 {
            until("it is held", || {
                keeper.touch();
                is_open(&device)
            });
            until("it is written", || {
                keeper.touch();
                std::fs::read(&device).unwrap() == 20_i32.to_ne_bytes()
            });
            until("it is given back", || !is_open(&device));
        }
    }

    #[test]
    fn what_may_not_be_opened_is_told_at_once() {
        let missing = Path::new("/nowhere/device");
        let error = Keeper::start(missing, 0, LINGER).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
