//! Counts what this node gives to other members, and announces it once a day (`node.gave`). Its own
//! status shows the counts at once.
//!
//! The counts are in the home, in `gave.json`: at most a minute of them is lost by a crash.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::calls::Served;
use hearthnet_bus::log::{Body, Gave, Member};
use hearthnet_files::WeightsId;
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::home::{Home, now_ms};
use crate::node::{DaemonNode, SoFar};

const FILE: &str = "gave.json";
/// Longest file in bytes.
const MAX_BYTES: u64 = 1024;
/// Interval of counting.
const TICK: Duration = Duration::from_secs(60);
/// Number of own durable events from which on none is written for contributions, so that the user's
/// own events never lack room (`specs/event-log.md`, section 5).
const MOST_EVENTS: u64 = 10_000;

/// Rows that the layers of this process have computed for other members.
#[derive(Default)]
pub(super) struct Computed(Mutex<Layers>);

#[derive(Default)]
struct Layers {
    /// Thousandths of tokens of earlier ranges.
    before: u64,
    /// Ranges served now, by model.
    now: BTreeMap<WeightsId, Range>,
}

struct Range {
    /// Layer rows computed for others.
    rows: Box<dyn Fn() -> u64 + Send>,
    /// Layers of the whole model.
    total: u32,
}

impl Range {
    fn millitokens(&self) -> u64 {
        (self.rows)().saturating_mul(1000) / u64::from(self.total.max(1))
    }
}

impl Computed {
    /// Counts another range of a model from here on, instead of an earlier one. `total` is the
    /// number of layers of the whole model.
    pub(super) fn begin(
        &self,
        model: WeightsId,
        rows: impl Fn() -> u64 + Send + 'static,
        total: u32,
    ) {
        self.end(model);
        let rows = Box::new(rows);
        self.0.lock().now.insert(model, Range { rows, total });
    }

    /// Ends the count of a model's range, after its last steps.
    pub(super) fn end(&self, model: WeightsId) {
        let mut layers = self.0.lock();
        if let Some(ended) = layers.now.remove(&model) {
            layers.before = layers.before.saturating_add(ended.millitokens());
        }
    }

    fn millitokens(&self) -> u64 {
        let layers = self.0.lock();
        let now = layers.now.values().map(Range::millitokens);
        now.fold(layers.before, u64::saturating_add)
    }
}

/// Counts since the node's admission.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Counts {
    /// Time of the admission, as in the log.
    since_ms: u64,
    millitokens: u64,
    minutes: u64,
    weights_bytes: u64,
}

impl Counts {
    /// Counts in a data directory. A missing or damaged file counts as zero: the log has the last
    /// announced ones.
    fn read(path: &Path) -> Self {
        let bytes = regular_file::read(path, MAX_BYTES).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    /// Counts of the current membership, at least those that the member has announced.
    fn of(self, member: &Member) -> Self {
        let known = match self.since_ms == member.since_ms {
            true => self,
            false => Self::default(),
        };
        let gave = member.gave.unwrap_or_default();
        Self {
            since_ms: member.since_ms,
            millitokens: known.millitokens.max(gave.tokens.saturating_mul(1000)),
            minutes: known.minutes.max(gave.minutes),
            weights_bytes: known.weights_bytes.max(gave.weights_bytes),
        }
    }

    fn gave(&self) -> Gave {
        Gave {
            day: 0,
            tokens: self.millitokens / 1000,
            minutes: self.minutes,
            weights_bytes: self.weights_bytes,
        }
    }
}

/// Counters, and the totals of this process up to the last count.
struct State {
    counts: Counts,
    millitokens: u64,
    weights_bytes: u64,
}

/// Counter of a daemon.
pub(super) struct Contributions {
    home: Home,
    node: Arc<DaemonNode>,
    computed: Arc<Computed>,
    served: Arc<Served>,
    path: PathBuf,
    state: Mutex<State>,
}

impl Contributions {
    pub(super) fn new(
        home: &Home,
        node: &Arc<DaemonNode>,
        computed: &Arc<Computed>,
        served: &Arc<Served>,
    ) -> Self {
        let path = home.dir.join(FILE);
        Self {
            home: home.clone(),
            node: Arc::clone(node),
            computed: Arc::clone(computed),
            served: Arc::clone(served),
            state: Mutex::new(State {
                counts: Counts::read(&path),
                millitokens: 0,
                weights_bytes: 0,
            }),
            path,
        }
    }

    /// Counts every minute, and announces the counts when a day has ended.
    pub(super) async fn run(self: Arc<Self>) {
        let mut ticks = interval_at(Instant::now() + TICK, TICK);
        // While the machine slept, nothing was served.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let minutes = u64::from(!self.served.all().is_empty());
            let this = Arc::clone(&self);
            let _ = tokio::task::spawn_blocking(move || this.count(minutes)).await;
            self.announce().await;
        }
    }

    /// Adds what was given since the last call, and stores the counts.
    pub(super) fn count(&self, minutes: u64) {
        let state = self.home.state();
        let Some(member) = state.member(&self.home.key.id()) else {
            return;
        };
        let mut state = self.state.lock();
        let mut now = self.counted(member, &state);
        now.counts.minutes = now.counts.minutes.saturating_add(minutes);
        let before = std::mem::replace(&mut *state, now);
        if state.counts == before.counts {
            return;
        }
        let written = serde_json::to_vec(&state.counts)
            .map_err(Into::into)
            .and_then(|json| whole_file::replace(&self.path, &json, Access::Owner));
        if let Err(error) = written {
            tracing::warn!("the counts of what this node gave are not stored: {error}");
        }
    }

    /// Contributions of this node up to this moment; `None` if it is no member.
    pub(super) fn so_far(&self) -> Option<SoFar> {
        let state = self.home.state();
        let member = state.member(&self.home.key.id())?;
        let gave = self.counted(member, &self.state.lock()).counts.gave();
        Some(SoFar {
            tokens: gave.tokens,
            minutes: gave.minutes,
            weights_bytes: gave.weights_bytes,
        })
    }

    /// Counts with what was given since the last count.
    fn counted(&self, member: &Member, before: &State) -> State {
        let mut now = State {
            counts: before.counts.of(member),
            millitokens: self.computed.millitokens(),
            weights_bytes: self.node.node.weights_sent(),
        };
        let more = |all: &mut u64, total: u64, before: u64| {
            *all = all.saturating_add(total.saturating_sub(before));
        };
        let counts = &mut now.counts;
        more(&mut counts.millitokens, now.millitokens, before.millitokens);
        more(
            &mut counts.weights_bytes,
            now.weights_bytes,
            before.weights_bytes,
        );
        now
    }

    /// Writes the event of the day, if it is due and a member is there. Tried again at the next tick
    /// if it fails.
    async fn announce(&self) {
        let own = self.home.key.id();
        let state = self.home.state();
        let Some(member) = state.member(&own) else {
            return;
        };
        let counted = self.state.lock().counts.of(member).gave();
        let next = Gave::next(counted, member.gave.as_ref(), member.since_ms, now_ms());
        let may = || self.is_in_sync() && self.home.last_seq(&own) < MOST_EVENTS;
        let Some(next) = next.filter(|_| may()) else {
            return;
        };
        if let Err(error) = self.node.append(&self.home, Body::NodeGave(next)).await {
            tracing::info!("what this node gave is not announced: {error}");
        }
    }

    /// Whether a member has compared its log with this one. Members may know later events of this
    /// node, as after an old copy of its disk was restored, and a second history freezes its key.
    /// They also contradict a wrong clock.
    fn is_in_sync(&self) -> bool {
        let peers = self.node.node.peers().into_iter();
        let mut links = peers.filter_map(|peer| peer.link);
        links.any(|link| link.progress.in_sync)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn member(since_ms: u64, gave: Option<Gave>) -> Member {
        Member {
            by: None,
            gave,
            name: String::new(),
            level: hearthnet_bus::log::Level::Member,
            since_ms,
            invite: None,
        }
    }

    #[test]
    fn rows_of_all_ranges_are_counted_as_shares_of_their_models() {
        let computed = Computed::default();
        let rows = Arc::new(AtomicU64::new(0));
        let read = |rows: &Arc<AtomicU64>| {
            let rows = Arc::clone(rows);
            move || rows.load(Ordering::Relaxed)
        };
        let [model, other] = [1, 2].map(|byte| WeightsId([byte; 32]));
        computed.begin(model, read(&rows), 32);
        rows.store(8 * 100, Ordering::Relaxed);
        assert_eq!(computed.millitokens(), 25_000);
        let second = Arc::new(AtomicU64::new(5));
        computed.begin(other, read(&second), 10);
        assert_eq!(computed.millitokens(), 25_500);
        // Another range of the first model, and the end of the second one.
        computed.begin(model, read(&second), 5);
        computed.end(other);
        second.store(10, Ordering::Relaxed);
        assert_eq!(computed.millitokens(), 27_500);
    }

    #[test]
    fn counts_survive_a_restart_a_lost_file_and_end_with_the_membership() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        assert_eq!(Counts::read(&path), Counts::default());
        let counts = Counts {
            since_ms: 7,
            millitokens: 41_999,
            minutes: 3,
            weights_bytes: 9,
        };
        std::fs::write(&path, serde_json::to_vec(&counts).unwrap()).unwrap();
        assert_eq!(Counts::read(&path), counts);
        assert_eq!(counts.of(&member(7, None)), counts);
        assert_eq!(counts.gave().tokens, 41);
        let again = counts.of(&member(8, None));
        assert_eq!((again.since_ms, again.millitokens), (8, 0));
        for damaged in ["", "{", "{\"minutes\":-1}"] {
            std::fs::write(&path, damaged).unwrap();
            let announced = Gave {
                day: 20_000,
                tokens: 50,
                minutes: 2,
                weights_bytes: 1,
            };
            let read = Counts::read(&path).of(&member(7, Some(announced)));
            assert_eq!(
                read.gave(),
                Gave {
                    day: 0,
                    ..announced
                }
            );
        }
    }
}
