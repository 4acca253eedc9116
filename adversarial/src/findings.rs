//! Observations of an attack, and the verdict on it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use hearthnet_transport::CloseCode;
use serde::Serialize;

use crate::raw::{Arrived, Ending, Pushed, SWITCHING, kind};

/// Single attempt or measurement, with its expected and its actual result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Observation {
    /// Action that was carried out.
    pub what: String,
    /// Expected result.
    pub expected: String,
    /// Actual result.
    pub seen: String,
    /// Whether the actual result is the expected one.
    pub held: bool,
    /// Code that the host raised, if one was expected and raised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Time from the start of the attempt until the attack was detected, if this observation is a
    /// detection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detected_us: Option<u64>,
}

/// Verdict on an attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every observation held.
    Held,
    /// At least one observation did not hold, or nothing was observed.
    NotHeld,
}

/// Microseconds of a duration.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Observations of an attack.
#[derive(Clone, Debug)]
pub(crate) struct Findings {
    pub(crate) observations: Vec<Observation>,
    /// Start of the current attempt.
    since: Instant,
}

impl Default for Findings {
    fn default() -> Self {
        Self {
            observations: Vec::new(),
            since: Instant::now(),
        }
    }
}

impl Findings {
    /// Starts an attempt: the time to detection counts from here. Without a call, an attempt starts
    /// with the observation before it.
    pub(crate) fn attempt(&mut self) {
        self.since = Instant::now();
    }

    /// Marks the latest observation as the detection of the attack, if it held. Observations that a
    /// code belongs to are marked by themselves.
    pub(crate) fn detected(&mut self, after: Duration) {
        if let Some(last) = self.observations.last_mut().filter(|last| last.held) {
            last.detected_us = Some(micros(after));
        }
    }

    /// Time since the start of the attempt.
    pub(crate) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// The host must have ended the session with this code, in BYE and in the WebSocket's close
    /// frame.
    pub(crate) fn ended(&mut self, what: impl Into<String>, code: CloseCode, ending: &Ending) {
        let held = ending.is(code);
        let raised = held.then(|| code.as_str());
        self.push(what, code.as_str(), ending.to_string(), held, raised);
    }

    /// The host must have closed a gossip session with this code.
    pub(crate) fn gossip_ended(
        &mut self,
        what: impl Into<String>,
        code: CloseCode,
        pushed: &Pushed,
    ) {
        let held = *pushed == Pushed::Closed(Some(code.number()));
        let seen = match pushed {
            Pushed::Closed(Some(number)) => {
                let name = CloseCode::from_repr(*number).map(CloseCode::as_str);
                name.map_or_else(|| format!("close code {number}"), str::to_owned)
            }
            Pushed::Closed(None) => "the connection ended without a code".to_owned(),
            Pushed::Stored { .. } => format!("the session went on: {pushed:?}"),
        };
        let raised = held.then(|| code.as_str());
        self.push(what, code.as_str(), seen, held, raised);
    }

    /// The host must have accepted and refused these numbers of events and kept the session open.
    /// It must have counted the refused events under `code`.
    pub(crate) fn taken(
        &mut self,
        what: impl Into<String>,
        (accepted, refused): (u64, u64),
        code: Option<&str>,
        pushed: &Pushed,
    ) {
        let expected = Pushed::Stored { accepted, refused };
        let held = *pushed == expected;
        let raised = code.filter(|_| held);
        let (expected, seen) = (format!("{expected:?}"), format!("{pushed:?}"));
        self.push(what, expected, seen, held, raised);
    }

    /// Any other expectation; the host must also have counted it under `code`.
    pub(crate) fn counted(
        &mut self,
        what: impl Into<String>,
        expected: impl Into<String>,
        seen: impl fmt::Display,
        held: bool,
        code: &str,
    ) {
        self.push(what, expected, seen.to_string(), held, held.then_some(code));
    }

    /// The host must have ended the session and counted it under this code. A peer that does not
    /// read may miss BYE and the close frame, but if they arrive they must carry this code.
    pub(crate) fn cut_off(&mut self, what: impl Into<String>, code: CloseCode, ending: &Ending) {
        let bye = ending.bye.as_deref().unwrap_or(code.as_str());
        let close = ending.close.unwrap_or(code.number());
        let held = !ending.hung && (bye, close) == (code.as_str(), code.number());
        let expected = format!("{code}, or the end");
        let raised = held.then(|| code.as_str());
        self.push(what, expected, ending.to_string(), held, raised);
    }

    /// The host must have refused a stream with this code and kept the session open.
    pub(crate) fn refused(&mut self, what: impl Into<String>, code: &str, answer: &Arrived) {
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

    /// The host must have opened a stream.
    pub(crate) fn opened(&mut self, what: impl Into<String>, answer: &Arrived) {
        self.holds(what, "opened", answer.is(kind::STREAM_OPENED));
    }

    /// The host must have computed a step.
    pub(crate) fn answered(&mut self, what: impl Into<String>, answer: &Arrived) {
        self.holds(what, "answered", answer.is(kind::STEP_RESULT));
    }

    /// The host must have refused the upgrade and counted it under this code. Before the upgrade
    /// the protocol has no way to send a reason.
    pub(crate) fn shut_out(&mut self, what: impl Into<String>, code: &str, answer: &str) {
        let held = !answer.starts_with(SWITCHING);
        let seen = match held {
            true => "no session".to_owned(),
            false => "a session".to_owned(),
        };
        self.push(what, "no session", seen, held, held.then_some(code));
    }

    /// Any other expectation.
    pub(crate) fn check(
        &mut self,
        what: impl Into<String>,
        expected: impl Into<String>,
        seen: impl fmt::Display,
        held: bool,
    ) {
        self.push(what, expected, seen.to_string(), held, None);
    }

    /// A yes-or-no expectation.
    pub(crate) fn holds(&mut self, what: impl Into<String>, expected: &str, held: bool) {
        self.check_or(what, expected, held, || "it is not so".to_owned());
    }

    /// A yes-or-no expectation; `otherwise` describes the failure.
    pub(crate) fn check_or(
        &mut self,
        what: impl Into<String>,
        expected: &str,
        held: bool,
        otherwise: impl FnOnce() -> String,
    ) {
        let seen = match held {
            true => expected.to_owned(),
            false => otherwise(),
        };
        self.push(what, expected, seen, held, None);
    }

    /// The operation must have succeeded; if it failed, its error is the actual result.
    pub(crate) fn done<T>(
        &mut self,
        what: impl Into<String>,
        expected: &str,
        result: Result<T, impl fmt::Display>,
    ) -> Option<T> {
        let (done, why) = match result {
            Ok(done) => (Some(done), String::new()),
            Err(why) => (None, why.to_string()),
        };
        self.check_or(what, expected, done.is_some(), || why);
        done
    }

    /// The actual result must equal the expected one, compared as text.
    pub(crate) fn same(
        &mut self,
        what: impl Into<String>,
        expected: impl fmt::Display,
        seen: impl fmt::Display,
    ) {
        let (expected, seen) = (expected.to_string(), seen.to_string());
        let held = expected == seen;
        self.push(what, expected, seen, held, None);
    }

    fn push(
        &mut self,
        what: impl Into<String>,
        expected: impl Into<String>,
        seen: String,
        held: bool,
        code: Option<&str>,
    ) {
        self.observations.push(Observation {
            detected_us: code.map(|_| micros(self.elapsed())),
            code: code.map(str::to_owned),
            what: what.into(),
            expected: expected.into(),
            seen,
            held,
        });
        self.attempt();
    }

    /// Number of times each code was raised.
    pub(crate) fn raised(&self) -> BTreeMap<String, u64> {
        let mut raised = BTreeMap::new();
        let codes = self.observations.iter();
        for code in codes.filter_map(|seen| seen.code.clone()) {
            *raised.entry(code).or_insert(0) += 1;
        }
        raised
    }

    /// Held if there is at least one observation and all of them held.
    pub(crate) fn verdict(&self) -> Verdict {
        let all = &self.observations;
        match !all.is_empty() && all.iter().all(|seen| seen.held) {
            true => Verdict::Held,
            false => Verdict::NotHeld,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_miss_or_no_observation_means_not_held() {
        let mut found = Findings::default();
        assert_eq!(found.verdict(), Verdict::NotHeld);
        found.check("a", "1", 1, true);
        assert_eq!(found.verdict(), Verdict::Held);
        found.ended("b", CloseCode::FrameRate, &Ending::default());
        found.same("c", 1, 1);
        found.same("d", "1", 2);
        assert_eq!(found.verdict(), Verdict::NotHeld);
        let held: Vec<bool> = found.observations.iter().map(|seen| seen.held).collect();
        assert_eq!(held, [true, false, true, false]);
    }

    #[test]
    fn an_observation_with_a_code_that_held_is_a_detection() {
        let mut found = Findings::default();
        found.counted("a", "1", 1, true, "frame_length");
        found.counted("b", "1", 2, false, "frame_length");
        found.same("c", 1, 1);
        let times = |found: &Findings| -> Vec<bool> {
            let all = found.observations.iter();
            all.map(|seen| seen.detected_us.is_some()).collect()
        };
        assert_eq!(times(&found), [true, false, false]);
        found.detected(Duration::from_micros(7));
        assert_eq!(times(&found), [true, false, true]);
        found.same("d", 1, 2);
        found.detected(Duration::ZERO);
        assert_eq!(times(&found), [true, false, true, false]);
    }
}
