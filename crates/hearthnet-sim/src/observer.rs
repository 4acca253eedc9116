//! The observer: records what happens, and checks it against what may happen.
//!
//! It knows what a run without faults does, and nothing of the code under test.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Records of one run. Clones share them. Each [`Actor`] adds its events.
#[derive(Clone)]
pub(crate) struct Observer {
    begin: Instant,
    records: Arc<Mutex<Records>>,
}

#[derive(Default)]
struct Records {
    /// Virtual microseconds, actor, event.
    trace: Vec<(u128, String, String)>,
    violations: Vec<String>,
}

impl Observer {
    /// Time counts from here.
    pub(crate) fn begin() -> Self {
        Self {
            begin: Instant::now(),
            records: Arc::default(),
        }
    }

    pub(crate) fn actor(&self, name: impl Into<String>) -> Actor {
        Actor {
            name: name.into(),
            observer: self.clone(),
        }
    }

    /// Ends the run. In its trace, events of one moment are ordered by actor: independent events of
    /// the same moment have no order.
    pub(crate) fn finish(&self, done: u32, failed: u32) -> Report {
        let mut records = self.records.lock();
        let mut trace = std::mem::take(&mut records.trace);
        trace.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        let line = |(at, actor, event)| format!("{:>10.3} ms  {actor:<8} {event}", at as f64 / 1e3);
        let trace: Vec<String> = trace.into_iter().map(line).collect();
        let mut hasher = DefaultHasher::new();
        trace.hash(&mut hasher);
        Report {
            hash: hasher.finish(),
            trace,
            violations: std::mem::take(&mut records.violations),
            done,
            failed,
        }
    }
}

/// An actor of a run, whose events are recorded.
#[derive(Clone)]
pub(crate) struct Actor {
    pub(crate) name: String,
    observer: Observer,
}

impl Actor {
    /// Records an event.
    pub(crate) fn note(&self, event: impl Into<String>) {
        let at = self.observer.begin.elapsed().as_micros();
        let event = (at, self.name.clone(), event.into());
        self.observer.records.lock().trace.push(event);
    }

    /// Records that an invariant does not hold.
    pub(crate) fn violated(&self, what: impl Into<String>) {
        let what = what.into();
        let seconds = self.observer.begin.elapsed().as_secs_f64();
        self.note(format!("VIOLATION {what}"));
        let violation = format!("{seconds:.3} s, {}: {what}", self.name);
        self.observer.records.lock().violations.push(violation);
    }

    /// Checks a condition.
    pub(crate) fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.violated(what());
        }
    }
}

/// The result of a run.
#[derive(Debug)]
pub struct Report {
    pub trace: Vec<String>,
    /// Hash of the trace.
    pub hash: u64,
    /// Invariants that did not hold.
    pub violations: Vec<String>,
    /// Calls or appends that were done, and those that ended with an error.
    pub done: u32,
    pub failed: u32,
}
