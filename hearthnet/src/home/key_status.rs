//! Detects a revoked or frozen node key and clock skew, and prints one warning per command. Both
//! otherwise surface as unrelated errors.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Community, EventLog, Level};
use hearthnet_platform::machine::up_ms;
use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cli::failure::IN_DOUBT;
use crate::cli::{Failure, Kind, failure, note, span, when};
use crate::config::Config;
use crate::home::community::{Home, ROOT_KEY, now_ms};
use crate::home::membership::Membership;

/// Clock difference from which a warning is printed. Neighbours' times may be 40 s old, and session
/// tokens allow for a minute.
const WRONG_MS: u64 = 60_000;
/// Age in ms at which a measurement of the clock expires.
const MEASURED_MS: u64 = 15 * 60_000;
/// Difference in ms between the clock and the time since boot from which the clock counts as set
/// since the measurement.
const SET_MS: u64 = 30_000;
/// Name of the file with the last measurement, which exists while the clock is wrong.
pub(crate) const CLOCK_FILE: &str = "clock.json";
/// Largest size that is read: the file holds four numbers.
const MAX_CLOCK_BYTES: u64 = 4096;

/// Validity of this node's key in its community.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeyStatus {
    /// Valid, or not a member yet.
    Good,
    /// Revoked in the log, at this time (Unix ms).
    Revoked(u64),
    /// Frozen in the log: two histories were signed with the key.
    Frozen,
    /// Refused by a member (by an anchor, if there is another) whose log this node does not have.
    Refused(String),
}

impl KeyStatus {
    /// Status from the log and from the membership file.
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

    /// Stable error code of the same failure.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Revoked(_) | Self::Refused(_) => "revoked",
            Self::Frozen => "frozen",
        }
    }

    /// Message for `community`; empty if the key is valid.
    pub(crate) fn sentence(&self, community: &str) -> String {
        match self {
            Self::Good => String::new(),
            Self::Revoked(at) => {
                format!("this node was revoked in {community:?} on {}", when(*at))
            }
            Self::Frozen => format!(
                "this node is frozen in {community:?}: two histories were signed with its key, as when an old copy of its data is used; other nodes ignore its events"
            ),
            Self::Refused(by) => format!(
                "{by} says that this node's key is no longer valid in {community:?}: it was revoked, or frozen because an old copy of its data was used"
            ),
        }
    }

    /// Hint for the user.
    pub(crate) fn remedy(&self, has_root: bool) -> &'static str {
        match (self, has_root) {
            (Self::Good, _) => "",
            (_, false) => {
                "`hearthnet community leave` puts the key and the log away; then a new code and `hearthnet community join CODE` make this home a member again"
            }
            // A node cannot revoke the root key, which belongs to none.
            (_, true) => {
                "the root key here is still valid: `hearthnet community renew` gives this home a new key"
            }
        }
    }
}

/// Prints a warning if the log is in doubt, or if the clock is wrong.
pub(crate) fn warn_before_command(home: &Home) {
    if home.log.is_in_doubt() && home.state().members().count() > 1 {
        note(IN_DOUBT);
    }
    warn_of_clock(&home.dir);
}

/// Prints a warning if the recorded status of the node of `dir` is not good, unless a command has
/// failed for that reason.
pub(crate) fn warn_of_key(dir: &Path, failure: Option<&Failure>) {
    let Some(noted) = Membership::read(dir) else {
        return;
    };
    let status = KeyStatus::noted(&noted);
    let is_told = failure.is_some_and(|failure| failure.has_code(status.code()));
    if status != KeyStatus::Good && !is_told {
        let remedy = status.remedy(dir.join(ROOT_KEY).exists());
        note(format!(
            "warning: {}\nhint: {remedy}",
            status.sentence(&noted.name)
        ));
    }
}

/// Clock offset, when neighbours were last heard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Measured {
    /// Offset of the neighbours' clocks in ms; negative: they are behind.
    offset_ms: i64,
    neighbours: usize,
    /// Time of the measurement by this machine's clock, Unix ms.
    at_ms: u64,
    /// Time of the measurement in ms since boot.
    up_ms: u64,
}

/// Compares this machine's clock with the neighbours' and records a wrong clock for other commands.
/// Returns `true` if the error is new.
pub(crate) fn record_clock(dir: &Path, log: &EventLog) -> bool {
    let Some((offset_ms, neighbours)) = log.clock_offset(now_ms()) else {
        return false;
    };
    let file = dir.join(CLOCK_FILE);
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
        // Only for warnings, so a full disk is not reported here.
        let _ = whole_file::replace(&file, &bytes, Access::Owner);
    }
    old.is_none()
}

/// Last measurement, if it is still valid.
fn measured(dir: &Path) -> Option<Measured> {
    let bytes = regular_file::read(&dir.join(CLOCK_FILE), MAX_CLOCK_BYTES).ok()?;
    let measured: Measured = serde_json::from_slice(&bytes).ok()?;
    measured.holds(now_ms(), up_ms()).then_some(measured)
}

impl Measured {
    /// Whether the measurement is fresh, and the clock was not set since. `up_ms` is the time since
    /// boot.
    fn holds(&self, now_ms: u64, up_ms: u64) -> bool {
        let clock = now_ms.checked_sub(self.at_ms);
        let passed = clock.zip(up_ms.checked_sub(self.up_ms));
        passed.is_some_and(|(clock, up)| clock <= MEASURED_MS && clock.abs_diff(up) <= SET_MS)
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

/// Prints once that the clock is wrong, if known.
pub(crate) fn warn_of_clock(dir: &Path) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if let Some(measured) = measured(dir)
        && !SAID.swap(true, Ordering::Relaxed)
    {
        note(format!("warning: {}", measured.sentence()));
    }
}

/// Warnings about events dated so far ahead that other nodes do not accept them: this node's from
/// its own log, others' as its daemon refused them.
pub(crate) fn dated_ahead(home: &Home, by_daemon: Option<&BTreeMap<NodeId, u64>>) -> Vec<String> {
    let (state, own) = (home.state(), home.key.id());
    let mut ahead = by_daemon.cloned().unwrap_or_default();
    ahead.extend(home.log.dated_ahead(now_ms()).unwrap_or_default());
    let line = |(node, ms): (NodeId, u64)| match node == own {
        true => format!(
            "the last event of this node is dated {} ahead, so other nodes do not accept it: its clock was wrong. With the clock right it is sent as soon as the node runs among others",
            span(ms)
        ),
        false => format!(
            "the last event of {} is dated {} ahead, and is not accepted here: its clock was or is wrong",
            state.label(&node, now_ms()),
            span(ms)
        ),
    };
    ahead.into_iter().map(line).collect()
}

/// Number of back-dated events of each author: received after other members' later-dated events.
pub(crate) fn dated_back(home: &Home) -> BTreeMap<NodeId, u64> {
    home.log.dated_back().unwrap_or_else(|error| {
        tracing::warn!("the event log could not be read: {error}");
        BTreeMap::new()
    })
}

/// Warning about back-dated events of current members. Their machine was offline, or their owner
/// back-dates events.
pub(crate) fn dated_back_line(state: &Community, found: &BTreeMap<NodeId, u64>) -> Option<String> {
    let members = found
        .iter()
        .filter(|(node, _)| state.member(node).is_some());
    let of = |(node, n): (&NodeId, &u64)| format!("{n} of {}", state.label(node, now_ms()));
    let all: Vec<String> = members.map(of).collect();
    (!all.is_empty()).then(|| {
        format!(
            "back-dated events: {}. The machine was offline, or its owner back-dates on purpose: if it was online, revoke it (`hearthnet community revoke`); `hearthnet log verify` says more",
            all.join(", ")
        )
    })
}

/// Status for `status --json`.
pub(crate) fn json(home: &Home) -> Value {
    let status = KeyStatus::of(home);
    json!({
        "state": status.code(),
        "why": status.sentence(&home.state().name),
        "clock_offset_ms": measured(&home.dir).map(|measured| measured.offset_ms),
        "log_in_doubt": home.log.is_in_doubt(),
    })
}

impl Home {
    /// Records a refusal of this node's key by an anchor, which stops everything that runs for it.
    /// Returns `true` the first time.
    pub(crate) fn record_refusal(&self, anchor: &NodeId) -> bool {
        let by = self.state().label(anchor, now_ms());
        Membership::note_refusal(&self.dir, Some(by.clone()));
        let first = self.refused.set(by).is_ok();
        if first {
            self.log.touch();
        }
        first
    }

    /// Returns this node's level, or an error if it is no member.
    pub(crate) fn level(&self) -> Result<Level, Failure> {
        let state = self.state();
        let status = match (self.refused.get(), state.level(&self.key.id())) {
            (Some(by), _) => KeyStatus::Refused(by.clone()),
            // A recorded refusal does not bind: asked again, the anchor may have newer events.
            (None, Some(level)) => return Ok(level),
            (None, None) => KeyStatus::of(self),
        };
        self.accept(&status)?;
        Err(failure!(Community, "this node is not a member of {:?}", state.name)
        .code("unauthorized")
        .hint("`hearthnet community leave` puts its log away; then join with a code: `hearthnet community join CODE`"))
    }

    /// Returns an error if the node's key is no longer valid, by the log or by a recorded refusal.
    pub(crate) fn require_valid_key(&self) -> Result<(), Failure> {
        self.accept(&KeyStatus::of(self))
    }

    fn accept(&self, status: &KeyStatus) -> Result<(), Failure> {
        if *status == KeyStatus::Good {
            return Ok(());
        }
        let has_root = self.dir.join(ROOT_KEY).exists();
        let sentence = status.sentence(&self.state().name);
        Err(Failure::new(Kind::Community, sentence)
            .code(status.code())
            .hint(status.remedy(has_root)))
    }

    /// Returns an error if this node's level is below `least`. `what` completes "only ... nodes may
    /// ...".
    pub(crate) fn require(&self, least: Level, what: &str) -> Result<(), Failure> {
        let level = self.level()?;
        if level >= least {
            return Ok(());
        }
        Err(failure!(
            Community,
            "this node is {level} in {:?}, and only {least} nodes may {what}",
            self.state().name
        )
        .code("unauthorized")
        .hint(format!(
            "ask an anchor for `hearthnet community promote {} {least}`",
            self.key.id().short()
        )))
    }

    /// Returns an error unless this node and its community both allow distributed inference.
    pub(crate) fn require_research(&self, config: &Config) -> Result<(), Failure> {
        if !config.policy.research.enable {
            return Err(hearthnet_orchestrator::ChatError::ExperimentalDisabled.into());
        }
        if self.state().policy.research {
            return Ok(());
        }
        Err(failure!(
            ExperimentalDisabled,
            "distributed inference is switched off in {:?}: the community's policy research is off",
            self.state().name
        )
        .hint("an anchor can allow it with `hearthnet community policy --research on`"))
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::log::Body;
    use hearthnet_bus::testing;

    use super::*;

    #[test]
    fn a_post_dated_chain_is_reported_on_every_node() {
        let founded = testing::Home::founded(testing::key(1), true);
        let (home, node) = (Home::for_test(&founded), testing::id(1));
        assert!(dated_ahead(&home, None).is_empty());
        let refused = |node: &NodeId| BTreeMap::from([(*node, 3_600_000)]);
        let [line] = &dated_ahead(&home, Some(&refused(&testing::id(2))))[..] else {
            panic!("one line");
        };
        assert!(
            line.contains("not accepted here") && line.contains("60 min"),
            "{line}"
        );
        let name = "attic".to_owned();
        home.log
            .append(&home.key, Body::Named { name }, now_ms() + 86_400_000)
            .unwrap();
        let [line] = &dated_ahead(&home, Some(&refused(&node)))[..] else {
            panic!("one line");
        };
        assert!(line.contains("last event of this node"), "{line}");
    }

    #[test]
    fn back_dated_events_are_reported_while_their_author_is_a_member() {
        let (founder, other) = (testing::key(1), testing::id(2));
        let here = testing::Home::founded(founder, true);
        here.admit(other, Level::Trusted);
        let there = testing::Home::joining(testing::key(2));
        testing::hear(&there.log, &here.log);
        let home = Home::for_test(&here);
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
        let members = crate::home::members::json(&home.state(), &home.key.id(), &dated_back(&home));
        let of = |node: &NodeId| members.iter().find(|m| m["node"] == node.to_string());
        assert_eq!(of(&other).unwrap()["dated_back"], 1);
        assert_eq!(of(&home.key.id()).unwrap()["dated_back"], 0);
        here.revoke(other);
        assert_eq!(line(), None);
    }

    #[test]
    fn a_clock_measurement_expires_with_age_clock_changes_and_reboots() {
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
