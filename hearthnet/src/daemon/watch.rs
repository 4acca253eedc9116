//! Watches the machine for `[manners]`: takes a reading several times a second, and publishes
//! whether layers are served.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use hearthnet_platform::cpu_time::cpu_time;
use hearthnet_platform::machine::{local_time, monotonic};
use hearthnet_platform::memory::shared_memory;
use hearthnet_platform::power::on_battery;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::manners::{Decision, Give, Reading, Why};
use crate::cli::{Failure, Kind, no_thread};
use crate::config::{Manners, QuietHours};
use crate::home::{OwnHours, Paused, now_ms};

/// Interval of readings. Together with [`RELEASE_WITHIN`] and the time in which a host ends, memory
/// is free within 2 s after other programs ran short of it.
const INTERVAL: Duration = Duration::from_millis(250);

/// Readings from one look at the battery to the next. A look may take an embedded controller
/// milliseconds.
const BATTERY_EVERY: u32 = 20;

/// Time for callers to move when memory is short.
pub(super) const RELEASE_WITHIN: Duration = Duration::from_millis(750);

/// Running watch; ends when dropped.
pub(super) struct Watch {
    give: watch::Receiver<Give>,
    pub(super) shared: Arc<Shared>,
    pub(super) configured_hours: Option<QuietHours>,
    /// Data directory, with the requests of the owner.
    pub(super) dir: PathBuf,
    _end: mpsc::Sender<()>,
}

/// State that other tasks set. It counts from the next reading on.
pub(super) struct Shared {
    pub(super) paused: Mutex<Option<Paused>>,
    /// The owner's quiet hours; `None`: as configured.
    pub(super) own_hours: Mutex<Option<OwnHours>>,
    /// Bytes that served layers hold, or held when they were withdrawn.
    held: AtomicU64,
}

impl Watch {
    /// Starts with the requests in the data directory.
    pub(super) fn start(dir: &Path, manners: &Manners) -> Result<Self, Failure> {
        let shared = Arc::new(Shared {
            paused: Mutex::new(Paused::read(dir)),
            own_hours: Mutex::new(OwnHours::read(dir)),
            held: AtomicU64::new(0),
        });
        let mut decision = Decision::new(manners.clone());
        let mut readings = Readings {
            shared: Arc::clone(&shared),
            manners: manners.clone(),
            taken: 0,
            on_battery: false,
        };
        let (sender, give) = watch::channel(decision.step(&readings.next()));
        let (end, ended) = mpsc::channel();
        thread::Builder::new()
            .name("manners".into())
            .spawn(move || {
                while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    let now = decision.step(&readings.next());
                    sender.send_if_modified(|give| std::mem::replace(give, now) != now);
                }
            })
            .map_err(|error| no_thread(&error))?;
        Ok(Self {
            give,
            shared,
            configured_hours: manners.quiet_hours,
            dir: dir.to_owned(),
            _end: end,
        })
    }

    pub(super) fn give(&self) -> watch::Receiver<Give> {
        self.give.clone()
    }

    /// Reports the memory of served layers.
    pub(super) fn set_held(&self, bytes: u64) {
        self.shared.held.store(bytes, Ordering::Relaxed);
    }
}

/// Source of readings. Reads only what the settings ask for.
struct Readings {
    shared: Arc<Shared>,
    manners: Manners,
    /// Readings so far.
    taken: u32,
    on_battery: bool,
}

impl Readings {
    fn next(&mut self) -> Reading {
        if self.taken.is_multiple_of(BATTERY_EVERY) && !self.manners.on_battery {
            self.on_battery = on_battery();
        }
        self.taken = self.taken.wrapping_add(1);
        let cpu = self.manners.only_when_idle.then(cpu_time).flatten();
        let now_ms = now_ms();
        Reading {
            up: monotonic(),
            now_ms,
            minute: local_time(now_ms).map(|local| local.minute),
            paused: *self.shared.paused.lock(),
            own_hours: *self.shared.own_hours.lock(),
            on_battery: self.on_battery,
            cpu,
            memory: shared_memory(),
            held_bytes: self.shared.held.load(Ordering::Relaxed),
        }
    }
}

/// Reason for people, with what would help.
pub(super) fn reason(why: &Why) -> Failure {
    let (code, text, hint) = match why {
        Why::Memory => (
            "memory_short",
            "other programs need the memory".to_owned(),
            "layers are served again when they have fitted for 60 s; a smaller manners.memory_percent leaves more to others",
        ),
        Why::Paused(paused) => ("paused", paused.to_string(), "`hearthnet resume` ends that"),
        Why::QuietHours(hours) => (
            "quiet_hours",
            format!("quiet hours until {}", hours.until),
            "manners.quiet_hours sets them, or the page (`hearthnet page`)",
        ),
        Why::Battery => (
            "on_battery",
            "on battery".to_owned(),
            "layers are served again 60 s after it is plugged in; manners.on_battery = true serves them anyway",
        ),
        Why::InUse => (
            "in_use",
            "this machine is in use".to_owned(),
            "layers are served when it has been idle for 60 s; manners.only_when_idle = false serves them anyway",
        ),
    };
    Failure::new(Kind::Busy, text).code(code).hint(hint)
}
