//! What an attack is, and what can be said of it afterwards.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;

use hearthnet_transport::CloseCode;
use serde::Serialize;

use crate::HarnessError;
use crate::attacks::table::{Try, carry_out};
use crate::bench::Bench;
use crate::case::Case;
use crate::memory::Budget;
use crate::raw::{Arrived, Ending, Pushed, SWITCHING, kind};
use crate::victim::Scene;

/// One attack with a story of its own: one file in `attacks/`, whose name is the claim that must hold.
pub trait Attack {
    /// Number of the case in [`CASES`](crate::CASES) that it carries out.
    const CASE: u8;

    /// What the victim is.
    const SCENE: Scene = Scene::ALONE;

    /// Whether it can be carried out again on the same victim. It cannot where the attacker is shut
    /// out for good.
    const REPEATS: bool = true;

    /// How much the victim may grow while this attack runs, and why so much.
    const BUDGET: Budget = Budget::SESSION;

    /// Carries it out. What is common to all attacks (no panic, memory, the honest caller, gauges
    /// back to zero) is checked around it.
    ///
    /// # Errors
    /// [`HarnessError`] if the attack could not be carried out; that is no verdict on the victim.
    fn run(bench: &mut Bench) -> impl Future<Output = Result<Verdict, HarnessError>> + Send;
}

type Running<'a> = Pin<Box<dyn Future<Output = Result<Verdict, HarnessError>> + Send + 'a>>;

/// How an attack is carried out.
#[derive(Clone, Copy)]
enum Work {
    Story(for<'a> fn(&'a mut Bench) -> Running<'a>),
    Table(fn(&Bench) -> Result<Vec<Try>, HarnessError>),
}

/// An attack as the registry lists it.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Name of the file or function, which is the claim with underscores.
    pub name: &'static str,
    /// Number of the case.
    pub case: u8,
    pub(crate) scene: Scene,
    pub(crate) repeats: bool,
    pub(crate) budget: Budget,
    work: Work,
}

impl Entry {
    pub(crate) const fn of<A: Attack + 'static>(name: &'static str) -> Entry {
        Entry {
            name,
            case: A::CASE,
            scene: A::SCENE,
            repeats: A::REPEATS,
            budget: A::BUDGET,
            work: Work::Story(|bench| Box::pin(A::run(bench))),
        }
    }

    /// An attack of the table: on a host outside of any community, as often as one likes.
    pub(crate) const fn listed(
        case: u8,
        name: &'static str,
        tries: fn(&Bench) -> Result<Vec<Try>, HarnessError>,
        budget: Budget,
    ) -> Entry {
        Entry {
            name,
            case,
            scene: Scene::ALONE,
            repeats: true,
            budget,
            work: Work::Table(tries),
        }
    }

    /// Carries it out.
    pub(crate) async fn run(self, bench: &mut Bench) -> Result<Verdict, HarnessError> {
        match self.work {
            Work::Story(run) => run(bench).await,
            Work::Table(tries) => {
                let mut found = Findings::new();
                let tries = tries(bench)?;
                carry_out(bench, tries, &mut found).await?;
                Ok(found.verdict())
            }
        }
    }

    /// The claim that must hold, in words.
    pub fn claim(&self) -> String {
        self.name.replace('_', " ")
    }

    /// The code that the case says must be raised or counted.
    pub fn code(&self) -> &'static str {
        Case::find(self.case).map_or("unknown", |case| case.code)
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("case", &self.case)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// One thing that was tried or looked at, and what was seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Observation {
    /// What was done.
    pub what: String,
    /// What must be seen.
    pub expected: String,
    /// What was seen.
    pub seen: String,
    /// Whether that is as it must be.
    pub held: bool,
    /// The code that the host raised, if it had to raise one and did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
}

/// What can be said of an attack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// Everything that was tried was met as it must be.
    Held {
        /// All of it.
        observations: Vec<Observation>,
    },
    /// At least one thing was not.
    NotHeld {
        /// All of it, what held too.
        observations: Vec<Observation>,
    },
    /// The attack has nothing to attack here.
    NotApplicable {
        /// Why it does not apply.
        reason: String,
    },
}

impl Verdict {
    /// The observations, if there are any.
    pub fn observations(&self) -> &[Observation] {
        match self {
            Verdict::Held { observations } | Verdict::NotHeld { observations } => observations,
            Verdict::NotApplicable { .. } => &[],
        }
    }
}

/// Collects observations.
#[derive(Clone, Debug, Default)]
pub struct Findings(Vec<Observation>);

impl Findings {
    /// Nothing found yet.
    pub fn new() -> Findings {
        Findings::default()
    }

    /// The host must have ended the session with this code, in BYE and in the WebSocket's close
    /// frame.
    pub fn ended(&mut self, what: impl Into<String>, code: CloseCode, ending: &Ending) {
        let held = ending.is(code);
        let raised = held.then(|| code.as_str());
        self.push(what, code.as_str(), ending.to_string(), held, raised);
    }

    /// The host must have closed a gossip session with this code.
    pub fn gossip_ended(&mut self, what: impl Into<String>, code: CloseCode, pushed: &Pushed) {
        let held = *pushed == Pushed::Closed(Some(code.number()));
        let seen = match pushed {
            Pushed::Closed(Some(number)) => {
                let name = CloseCode::from_number(*number).map(CloseCode::as_str);
                name.map_or_else(|| format!("close code {number}"), str::to_owned)
            }
            Pushed::Closed(None) => "the connection ended without a code".to_owned(),
            Pushed::Stored { .. } => format!("the session went on: {pushed:?}"),
        };
        let raised = held.then(|| code.as_str());
        self.push(what, code.as_str(), seen, held, raised);
    }

    /// The host must have taken so many events of those that were pushed, refused so many others,
    /// and gone on; what it refuses, it must have counted under this code.
    pub fn taken(
        &mut self,
        what: impl Into<String>,
        (accepted, refused): (u64, u64),
        code: Option<&str>,
        pushed: &Pushed,
    ) {
        let expected = Pushed::Stored { accepted, refused };
        let held = *pushed == expected;
        let raised = code.filter(|_| held);
        self.push(
            what,
            format!("{expected:?}"),
            format!("{pushed:?}"),
            held,
            raised,
        );
    }

    /// Anything else that must be, and that the host must have counted under this code.
    pub fn counted(
        &mut self,
        what: impl Into<String>,
        expected: impl Into<String>,
        seen: impl fmt::Display,
        held: bool,
        code: &str,
    ) {
        self.push(what, expected, seen.to_string(), held, held.then_some(code));
    }

    /// The host must have ended the session and counted it under this code. Saying so is in vain
    /// to a peer that does not read: what came of it must be right, but need not have come.
    pub fn cut_off(&mut self, what: impl Into<String>, code: CloseCode, ending: &Ending) {
        let bye = ending.bye.as_deref().unwrap_or(code.as_str());
        let close = ending.close.unwrap_or(code.number());
        let held = !ending.hung && (bye, close) == (code.as_str(), code.number());
        let expected = format!("{code}, or the end");
        let raised = held.then(|| code.as_str());
        self.push(what, expected, ending.to_string(), held, raised);
    }

    /// The host must have refused a stream with this code, and gone on with the session.
    pub fn refused(&mut self, what: impl Into<String>, code: &str, answer: &Arrived) {
        let refusal = answer
            .text("code")
            .filter(|_| answer.is(kind::STREAM_ERROR));
        let held = refusal.as_deref() == Some(code);
        let seen = match (refusal, answer) {
            (Some(refusal), _) => format!("stream error {refusal}"),
            (None, Arrived::Frame { kind, .. }) => format!("a frame of type {kind:#04x}"),
            (None, _) => "the session ended".to_owned(),
        };
        let raised = held.then_some(code);
        self.push(what, format!("stream error {code}"), seen, held, raised);
    }

    /// The host must have refused the upgrade, without a word (before it there is no way to say
    /// why), and must have counted it under this code.
    pub fn shut_out(&mut self, what: impl Into<String>, code: &str, answer: &str) {
        let held = !answer.starts_with(SWITCHING);
        let seen = match held {
            true => "no session".to_owned(),
            false => "a session".to_owned(),
        };
        self.push(what, "no session", seen, held, held.then_some(code));
    }

    /// Anything else that must be.
    pub fn check(
        &mut self,
        what: impl Into<String>,
        expected: impl Into<String>,
        seen: impl fmt::Display,
        held: bool,
    ) {
        self.push(what, expected, seen.to_string(), held, None);
    }

    fn push(
        &mut self,
        what: impl Into<String>,
        expected: impl Into<String>,
        seen: String,
        held: bool,
        code: Option<&str>,
    ) {
        self.0.push(Observation {
            code: code.map(str::to_owned),
            what: what.into(),
            expected: expected.into(),
            seen,
            held,
        });
    }

    /// Adds what was observed elsewhere.
    pub(crate) fn extend(&mut self, others: &[Observation]) {
        self.0.extend_from_slice(others);
    }

    /// How often each code was raised.
    pub(crate) fn raised(&self) -> BTreeMap<String, u64> {
        let mut raised = BTreeMap::new();
        for code in self.0.iter().filter_map(|seen| seen.code.clone()) {
            *raised.entry(code).or_insert(0) += 1;
        }
        raised
    }

    /// Held if everything did, and something was tried at all.
    pub fn verdict(self) -> Verdict {
        let observations = self.0;
        if !observations.is_empty() && observations.iter().all(|seen| seen.held) {
            Verdict::Held { observations }
        } else {
            Verdict::NotHeld { observations }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_miss_is_enough_and_nothing_tried_holds_nothing() {
        let mut found = Findings::new();
        assert!(matches!(found.clone().verdict(), Verdict::NotHeld { .. }));
        found.check("a", "1", 1, true);
        assert!(matches!(found.clone().verdict(), Verdict::Held { .. }));
        found.ended("b", CloseCode::FrameRate, &Ending::default());
        found.check("c", "1", 1, true);
        let Verdict::NotHeld { observations } = found.verdict() else {
            panic!("a miss must show")
        };
        let held: Vec<bool> = observations.iter().map(|seen| seen.held).collect();
        assert_eq!(held, [true, false, true]);
    }
}
