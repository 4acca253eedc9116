//! What this node may do in its community, and whether it is in good standing: one line in every
//! command if it is not. Its key may count no more, and its clock may be wrong; both look like a
//! hundred other troubles from where they are met.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_bus::log::{Community, EventLog, Level};
use hearthnet_bus::{NodeId, regular_file, whole_file};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::community::{Home, ROOT_KEY, now_ms};
use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::membership::Membership;
use crate::output::{note, span, when};

/// From here on clocks are said to differ: what neighbours say may be 40 s old, and session
/// tokens allow for a minute.
const WRONG_MS: u64 = 60_000;
/// A measurement of the clock is of no use after this long.
const MEASURED_MS: u64 = 15 * 60_000;
/// The clock was set since it was measured if it has moved by more than this against the time
/// since the machine started.
const SET_MS: u64 = 30_000;
/// The file with the last measurement, while the clock is wrong.
pub(crate) const CLOCK_FILE: &str = "clock.json";
/// Most bytes that are read of it: it has four numbers.
const MAX_CLOCK_BYTES: u64 = 4096;

/// What to do for a key that counts no more.
pub(crate) const NEW_KEY: &str = "`hearthnet community leave` puts the key and the log away; then a new code and `hearthnet community join CODE` make this home a member again";

/// Why this node's word counts for nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Standing {
    /// A member, or not yet one.
    Good,
    /// The log says that it was put out, at this time.
    Revoked(u64),
    /// The log says that two histories were signed with its key.
    Frozen,
    /// A member says so, an anchor where there is another, whose log this node has not got.
    Refused(String),
}

impl Standing {
    /// As the log has it, and what was noted beside it.
    pub(crate) fn of(home: &Home) -> Self {
        let own = home.key.id();
        Self::noted(&Membership::now(&home.dir, &home.state(), &own))
    }

    fn noted(noted: &Membership) -> Self {
        match (noted.revoked_ms, noted.frozen, &noted.put_out_by) {
            (Some(at), ..) => Self::Revoked(at),
            (None, true, _) => Self::Frozen,
            (None, false, Some(by)) => Self::Refused(by.clone()),
            (None, false, None) => Self::Good,
        }
    }

    /// The stable code; that of the failure that means the same.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Revoked(_) | Self::Refused(_) => "revoked",
            Self::Frozen => "frozen",
        }
    }

    /// What is so, in `community`; empty if all is well.
    pub(crate) fn sentence(&self, community: &str) -> String {
        match self {
            Self::Good => String::new(),
            Self::Revoked(at) => {
                format!("this node was put out of {community:?} on {}", when(*at))
            }
            Self::Frozen => format!(
                "this node is frozen in {community:?}: two histories were signed with its key, as when an old copy of its data is used, so nobody takes its word any more"
            ),
            Self::Refused(by) => format!(
                "{by} says that this node's key counts no more in {community:?}: it was revoked, or frozen because an old copy of its data was used"
            ),
        }
    }

    /// What to do about it.
    pub(crate) fn remedy(&self, has_root: bool) -> String {
        match (self, has_root) {
            (Self::Good, _) => String::new(),
            (_, false) => NEW_KEY.to_owned(),
            // The root key is no node's, and nobody can put it out.
            (_, true) => {
                "the root key here still counts: `hearthnet community renew` gives this home a new key by it".to_owned()
            }
        }
    }
}

/// Says what a command's copy of the log lacks, and that the clock is wrong.
pub(crate) fn look(home: &Home) {
    if home.log.is_in_doubt() && home.state().members().count() > 1 {
        note(
            "this copy of the community's log was put back or mended: until a member was asked \
             what it lacks, nothing new is written for the community",
        );
    }
    say_clock(&home.dir);
}

/// Says what is wrong with the node of `dir` when a command has ended, unless it failed for that very
/// reason and said so.
pub(crate) fn say(failure: Option<&Failure>, dir: &Path) {
    say_clock(dir);
    let noted = Membership::read(dir);
    let code = noted.map(|noted| Standing::noted(&noted).code());
    if !failure.is_some_and(|failure| code.is_some_and(|code| failure.has_code(code))) {
        warn(dir);
    }
}

/// Says the standing of the node of `dir`, as it was last noted, if it is not good.
pub(crate) fn warn(dir: &Path) {
    let Some(noted) = Membership::read(dir) else {
        return;
    };
    let standing = Standing::noted(&noted);
    if standing != Standing::Good {
        note(format!(
            "warning: {}\nhint: {}",
            standing.sentence(&noted.name),
            standing.remedy(dir.join(ROOT_KEY).exists())
        ));
    }
}

/// How far the clock was off when neighbours were last heard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Measured {
    /// Neighbours' clocks are so far ahead, in ms; negative: behind.
    offset_ms: i64,
    /// How many neighbours there were.
    neighbours: usize,
    /// When, by this machine's clock.
    at_ms: u64,
    /// The same moment, in ms since the machine started.
    up_ms: u64,
}

/// Milliseconds since this machine started, sleep included.
fn up_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1000) + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000
}

fn clock_file(dir: &Path) -> PathBuf {
    dir.join(CLOCK_FILE)
}

/// Compares this machine's clock with what neighbours said, and notes it for other commands while
/// it is wrong. `true` if it has just turned out to be wrong.
pub(crate) fn note_clock(dir: &Path, log: &EventLog) -> bool {
    let Some((offset_ms, neighbours)) = log.clock_offset(now_ms()) else {
        return false;
    };
    let file = clock_file(dir);
    if offset_ms.unsigned_abs() < WRONG_MS {
        if file.exists() {
            let _ = std::fs::remove_file(&file);
        }
        return false;
    }
    let (at_ms, up_ms) = (now_ms(), up_ms());
    let old = measured(dir);
    let new = Measured {
        offset_ms,
        neighbours,
        at_ms,
        up_ms,
    };
    let stale = |old: &Measured| at_ms.saturating_sub(old.at_ms) > MEASURED_MS / 3;
    if old.as_ref().is_none_or(stale)
        && let Ok(bytes) = serde_json::to_vec(&new)
    {
        // For people only: a disk that is full is reported elsewhere.
        let _ = whole_file::replace(&file, &bytes, 0o600);
    }
    old.is_none()
}

/// The last measurement, if it still says something about this clock.
fn measured(dir: &Path) -> Option<Measured> {
    let bytes = regular_file::read(&clock_file(dir), MAX_CLOCK_BYTES).ok()?;
    let measured: Measured = serde_json::from_slice(&bytes).ok()?;
    measured.holds(now_ms(), up_ms()).then_some(measured)
}

impl Measured {
    /// Whether it is fresh, and nobody has set the clock since. `now_ms` by the clock, `up_ms`
    /// since the machine started.
    fn holds(&self, now_ms: u64, up_ms: u64) -> bool {
        let (clock, up) = (
            now_ms.saturating_sub(self.at_ms),
            up_ms.saturating_sub(self.up_ms),
        );
        now_ms >= self.at_ms
            && up_ms >= self.up_ms
            && clock <= MEASURED_MS
            && clock.abs_diff(up) <= SET_MS
    }

    fn sentence(&self) -> String {
        let by = span(self.offset_ms.unsigned_abs());
        let whose = match self.neighbours {
            1 => "that of the other member heard".to_owned(),
            n => format!("those of {n} other members"),
        };
        let (this, remedy) = match self.offset_ms > 0 {
            true => ("behind", "slow"),
            false => ("ahead of", "fast"),
        };
        format!(
            "this machine's clock is {by} {this} {whose}: if it is the {remedy} one, set it (`timedatectl set-ntp true`); events and session tokens are refused when clocks differ"
        )
    }
}

/// Says once that the clock is wrong, if it is known to be.
pub(crate) fn say_clock(dir: &Path) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if let Some(measured) = measured(dir)
        && !SAID.swap(true, Ordering::Relaxed)
    {
        note(format!("warning: {}", measured.sentence()));
    }
}

/// Whose last event is dated so far ahead that others do not take it, a line each: of this node by its
/// own log, of others by what its daemon, if one runs, was offered and has refused.
pub(crate) fn dated_ahead(home: &Home, by_daemon: Option<&BTreeMap<String, u64>>) -> Vec<String> {
    let (state, own) = (home.state(), home.key.id());
    let mut ahead: BTreeMap<NodeId, u64> = by_daemon
        .into_iter()
        .flatten()
        .filter_map(|(node, ms)| Some((node.parse().ok()?, *ms)))
        .collect();
    ahead.extend(home.log.dated_ahead(now_ms()).unwrap_or_default());
    let line = |(node, ms): (NodeId, u64)| match node == own {
        true => format!(
            "what this node wrote last is dated {} ahead, so nobody takes it: its clock was wrong. With the clock right it is passed on as soon as the node runs among others",
            span(ms)
        ),
        false => format!(
            "the last event of {} is dated {} ahead, and is not taken here: its clock was wrong, or is",
            state.label(&node, now_ms()),
            span(ms)
        ),
    };
    ahead.into_iter().map(line).collect()
}

/// How many events of each author came to light when others had written what is dated later.
pub(crate) fn dated_back(home: &Home) -> BTreeMap<NodeId, u64> {
    home.log.dated_back().unwrap_or_else(|error| {
        tracing::warn!("the event log could not be read: {error}");
        BTreeMap::new()
    })
}

/// The same for people, of who is a member yet, if there is any such event: its author was away when it
/// wrote it, or dates back what it writes.
pub(crate) fn dated_back_line(state: &Community, found: &BTreeMap<NodeId, u64>) -> Option<String> {
    let members = found
        .iter()
        .filter(|(node, _)| state.member(node).is_some());
    let of = |(node, n): (&NodeId, &u64)| format!("{n} of {}", state.label(node, now_ms()));
    let all: Vec<String> = members.map(of).collect();
    (!all.is_empty()).then(|| {
        format!(
            "events that came to light after others had written what is dated later: {}. Its machine was away, or it dates them back: whoever was not away can be put out (`hearthnet community revoke`); `hearthnet log verify` says more",
            all.join(", ")
        )
    })
}

/// For `status --json`.
pub(crate) fn json(home: &Home) -> Value {
    let standing = Standing::of(home);
    json!({
        "state": standing.code(),
        "why": standing.sentence(&home.state().name),
        "clock_offset_ms": measured(&home.dir).map(|measured| measured.offset_ms),
        "log_in_doubt": home.log.is_in_doubt(),
    })
}

impl Home {
    /// Notes that an anchor said that this node's key counts no more: whatever runs for it ends.
    /// `true` the first time.
    pub(crate) fn refused_by(&self, anchor: &NodeId) -> bool {
        let by = by(self, anchor);
        Membership::note_put_out(&self.dir, Some(by.clone()));
        let first = self.refused.set(by).is_ok();
        if first {
            self.log.touch();
        }
        first
    }

    /// This node's level; a refusal if it has none (any more).
    pub(crate) fn level(&self) -> Result<Level, Failure> {
        let state = self.state();
        let standing = match (self.refused.get(), state.level(&self.key.id())) {
            (Some(by), _) => Standing::Refused(by.clone()),
            // What was noted of other days does not bind: asked again, an anchor may know better.
            (None, Some(level)) => return Ok(level),
            (None, None) => Standing::of(self),
        };
        self.accept(&standing)?;
        Err(Failure::new(
            Kind::Community,
            format!("this node is not a member of {:?}", state.name),
        )
        .code("unauthorized")
        .hint("`hearthnet community leave` puts its log away; then join with a code: `hearthnet community join CODE`"))
    }

    /// Refuses if the node's key counts no more, by the log or by what was noted of what others
    /// said.
    pub(crate) fn good_standing(&self) -> Result<(), Failure> {
        self.accept(&Standing::of(self))
    }

    fn accept(&self, standing: &Standing) -> Result<(), Failure> {
        if *standing == Standing::Good {
            return Ok(());
        }
        let has_root = self.dir.join(ROOT_KEY).exists();
        let sentence = standing.sentence(&self.state().name);
        Err(Failure::new(Kind::Community, sentence)
            .code(standing.code())
            .hint(standing.remedy(has_root)))
    }

    /// Refuses if this node's level is below `least`. `what` ends "only ... may ...".
    pub(crate) fn require(&self, least: Level, what: &str) -> Result<(), Failure> {
        let level = self.level()?;
        if level >= least {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Community,
            format!(
                "this node is {level} in {:?}, and only {least} nodes may {what}",
                self.state().name
            ),
        )
        .code("unauthorized")
        .hint(format!(
            "ask an anchor for `hearthnet community promote {} {least}`",
            self.key.id().short()
        )))
    }

    /// Refuses unless this node and its community both allow distributed inference.
    pub(crate) fn require_research(&self, config: &Config) -> Result<(), Failure> {
        if !config.policy.research.enable {
            return Err(hearthnet_orchestrator::ChatError::ExperimentalDisabled.into());
        }
        if self.state().policy.research {
            return Ok(());
        }
        Err(Failure::new(
            Kind::ExperimentalDisabled,
            format!(
                "distributed inference is switched off in {:?}: the community's policy research is off",
                self.state().name
            ),
        )
        .hint("an anchor can allow it with `hearthnet community policy --research on`"))
    }
}

/// Who says that this node was put out, as a person should read it.
pub(crate) fn by(home: &Home, anchor: &NodeId) -> String {
    home.state().label(anchor, now_ms())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hearthnet_bus::log::{Body, Policy};
    use hearthnet_bus::{NodeKey, testing};

    use super::*;

    #[test]
    fn a_chain_that_is_dated_ahead_is_a_line_on_its_own_node_and_on_others() {
        let dir = tempfile::tempdir().unwrap();
        let (root, own) = (NodeKey::generate().unwrap(), NodeKey::generate().unwrap());
        let (node, now, policy) = (own.id(), now_ms(), Policy::default());
        let log = EventLog::create(dir.path(), &root, node, "Elm", policy, now).unwrap();
        let home = Home::new(dir.path().to_owned(), Arc::new(own), log);
        assert!(dated_ahead(&home, None).is_empty());
        let refused = |node: &NodeId| BTreeMap::from([(node.to_string(), 3_600_000)]);
        let [line] = &dated_ahead(&home, Some(&refused(&root.id())))[..] else {
            panic!("one line");
        };
        assert!(
            line.contains("not taken here") && line.contains("60 min"),
            "{line}"
        );
        let name = "attic".to_owned();
        home.log
            .append(&home.key, Body::Named { name }, now + 86_400_000)
            .unwrap();
        let [line] = &dated_ahead(&home, Some(&refused(&node)))[..] else {
            panic!("one line");
        };
        assert!(line.contains("this node wrote last"), "{line}");
    }

    #[test]
    fn who_wrote_while_others_went_on_is_in_a_line_for_as_long_as_it_is_a_member() {
        let (founder, other) = (testing::key(1), testing::id(2));
        let here = testing::Home::founded(founder, true);
        here.admit(other, Level::Trusted);
        let there = testing::Home::joining(testing::key(2));
        testing::hear(&there.log, &here.log);
        let home = Home::new(
            here.path().to_owned(),
            Arc::clone(&here.key),
            here.log.clone(),
        );
        let line = || dated_back_line(&home.state(), &dated_back(&home));
        assert_eq!(line(), None);
        let named = |name: &str| Body::Named { name: name.into() };
        here.append(named("attic"));
        here.append(named("loft"));
        there.append(named("shed"));
        testing::hear(&here.log, &there.log);
        assert_eq!(dated_back(&home), BTreeMap::from([(other, 1)]));
        let said = line().unwrap();
        assert!(
            said.contains("1 of shed") && said.contains("`hearthnet community revoke`"),
            "{said}"
        );
        let members = crate::members::json(&home.state(), &home.key.id(), &dated_back(&home));
        let of = |node: &NodeId| members.iter().find(|m| m["node"] == node.to_string());
        assert_eq!(of(&other).unwrap()["dated_back"], 1);
        assert_eq!(of(&home.key.id()).unwrap()["dated_back"], 0);
        here.revoke(other);
        assert_eq!(line(), None);
    }

    #[test]
    fn a_measurement_holds_until_it_is_old_or_the_clock_was_set_or_the_machine_started_anew() {
        let measured = Measured {
            offset_ms: -840_000,
            neighbours: 1,
            at_ms: 10_000_000,
            up_ms: 500_000,
        };
        assert!(measured.holds(10_000_000, 500_000));
        assert!(measured.holds(10_600_000, 1_100_000));
        // Set back by 14 minutes, or forward.
        assert!(!measured.holds(9_160_000, 500_100));
        assert!(!measured.holds(10_840_000, 500_100));
        assert!(!measured.holds(10_010_000, 10_000));
        assert!(!measured.holds(11_000_000, 1_500_000));
        let line = measured.sentence();
        assert!(line.contains("14 min ahead of"), "{line}");
    }
}
