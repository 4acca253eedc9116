//! Limit of the CPU wake-up latency while rows travel.
//!
//! A host computes for a millisecond and then waits for the next row, and its idle core goes to
//! sleep. Waking up takes from a microsecond to well over a hundred, depending on the depth of
//! sleep; a virtual machine's core may first have to be scheduled again by the hypervisor. Per hop
//! and token that costs more than the rest of the way.
//!
//! Linux avoids deep sleep states while a process holds `/dev/cpu_dma_latency` open with a limit in
//! microseconds written to it (PM `QoS`, `Documentation/power/pm_qos_interface.rst` in the kernel's
//! sources). It costs power on all cores, so it is held only while messages are sent, and only in a
//! virtual machine ([`advised`]) or if the machine's owner has configured it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

const DEVICE: &str = "/dev/cpu_dma_latency";

/// Time after the last message at which the limit ends: longer than any step takes.
const LINGER: Duration = Duration::from_millis(200);

/// Kernel file with the name of the idle driver.
const IDLE_DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";

/// Default limit: 0 in a virtual machine, whose idle cores return to the hypervisor and wake up
/// late, whatever the guest kernel assumes. `None` elsewhere.
pub fn advised() -> Option<u32> {
    let driver = std::fs::read_to_string(IDLE_DRIVER).ok()?;
    // The idle driver of guests.
    (driver.trim() == "haltpoll").then_some(0)
}

static KEEPER: OnceLock<Arc<Keeper>> = OnceLock::new();

/// Limits the wake-up latency to `microseconds` whenever this process has sent a session message in
/// the last 200 ms. With 0, cores do not sleep at all meanwhile, which a virtual machine needs; 20
/// keeps a physical one out of deep sleep states. Only the first call counts.
///
/// # Errors
/// If `/dev/cpu_dma_latency` cannot be opened for writing (by default only root may, and it exists
/// on Linux only), or the system gives no thread.
pub fn limit(microseconds: u32) -> io::Result<()> {
    let keeper = Keeper::start(Path::new(DEVICE), microseconds, LINGER)?;
    // A second keeper is dropped: it was never touched, so its thread holds nothing.
    let _ = KEEPER.set(keeper);
    Ok(())
}

/// Reports that a message is sent.
pub fn touch() {
    if let Some(keeper) = KEEPER.get() {
        keeper.touch();
    }
}

/// Holds the limit while it is touched regularly.
#[derive(Debug)]
struct Keeper {
    began: Instant,
    /// Time of the last touch, in microseconds since `began`.
    touched: AtomicU64,
    /// True if the thread sleeps and must be woken.
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Keeper {
    fn start(device: &Path, microseconds: u32, linger: Duration) -> io::Result<Arc<Self>> {
        // Opened once here, so that a missing permission is reported at the start.
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
                    tracing::warn!("the CPU wake-up latency is no longer limited: {error}");
                    return;
                }
            }
            self.asleep.store(true, Ordering::SeqCst);
            // A touch before that line has not woken the thread.
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

    /// A regular file stands in for the device: writes and closes are the same.
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
    fn a_device_that_cannot_be_opened_is_reported_at_once() {
        let missing = Path::new("/nowhere/device");
        let error = Keeper::start(missing, 0, LINGER).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
