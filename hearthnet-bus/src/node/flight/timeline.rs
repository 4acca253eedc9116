//! Merges several nodes' records into one timeline. Pure.
//!
//! # Clocks
//!
//! A node dates its record by its own clocks, which may be wrong. The time of its answer is known
//! on this side to within half of the round trip (as in NTP):
//!
//! ```text
//!            asked      answered        heard
//!   here  ────┼────────────┊──────────────┼────▶   taken as the middle of the round trip
//!   there ────────●────────┼──────────────────▶    ● event, by its age at the answer
//! ```
//!
//! The age of an event at the answer comes from a monotonic clock. Its time here is
//! `middle - (answered - at)`, with an uncertainty of half a round trip plus the drift between the
//! clocks. Wall clocks of other nodes are shown but not used.
//!
//! A host opens a stream after it was asked to, and before its caller receives the answer. So a
//! host's stream event is moved between these two, by at most its uncertainty.
//!
//! # Trust
//!
//! A node's record may be false, but only about that node. A host's event is joined with a pipeline
//! only if the caller that it names recorded the same stream on this host. Impossible times are
//! clamped to the nearest possible ones, and marked.

use std::collections::HashMap;

use super::event::{Event, StreamTrace};
use super::ids::PipelineId;
use super::ring::Record;
use super::share::Answer;
use crate::NodeId;

/// Assumed drift between two clocks, in parts per million: more than that of quartz clocks.
const DRIFT_PPM: u64 = 100;

/// An event of the merged timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Printers read every field.
pub struct Entry {
    /// Time in microseconds of Unix time, by this machine's clock.
    pub at_us: u64,
    /// Uncertainty of `at_us`, in microseconds.
    pub give_or_take_us: u64,
    /// True if its node dated it after the answer, or before its program's start.
    pub doubtful: bool,
    /// Node whose record holds the event.
    pub node: NodeId,
    /// Pipeline of the event, if known.
    pub pipeline: Option<PipelineId>,
    pub record: Record,
}

/// Offset of a node's wall clock from this machine's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Two numbers.
pub struct Clock {
    /// Offset in milliseconds; positive if the node's clock is ahead.
    pub ahead_ms: i64,
    /// Uncertainty of the offset, in microseconds.
    pub give_or_take_us: u64,
}

impl Answer {
    fn half_trip_us(&self) -> u64 {
        self.heard.mono_us.saturating_sub(self.asked.mono_us) / 2
    }

    /// Time of the other node's answer, in microseconds of this machine's Unix time.
    fn answered_us(&self) -> u64 {
        let heard_us = self.heard.unix_ms.saturating_mul(1000);
        heard_us.saturating_sub(self.half_trip_us())
    }

    /// Offset of the other node's wall clock.
    pub fn clock(&self) -> Clock {
        let here = i64::try_from(self.answered_us() / 1000).unwrap_or(i64::MAX);
        let there = i64::try_from(self.page.now.unix_ms).unwrap_or(i64::MAX);
        Clock {
            ahead_ms: there.saturating_sub(here),
            give_or_take_us: self.half_trip_us(),
        }
    }

    /// This machine's Unix time at 0 of its monotonic clock, in microseconds.
    fn epoch_us(&self) -> i128 {
        i128::from(self.heard.unix_ms) * 1000 - i128::from(self.heard.mono_us)
    }

    fn place(&self, node: NodeId, record: &Record, epoch_us: i128) -> Entry {
        let (began, now) = (self.page.began.mono_us, self.page.now.mono_us);
        let at = record.at.mono_us;
        let doubtful = at > now || at < began;
        let at = at.max(began).min(now);
        let age_us = now.saturating_sub(at);
        let answered_us = self.heard.mono_us.saturating_sub(self.half_trip_us());
        let here_us = epoch_us + i128::from(answered_us) - i128::from(age_us);
        Entry {
            at_us: u64::try_from(here_us.max(0)).unwrap_or(u64::MAX),
            give_or_take_us: self
                .half_trip_us()
                .saturating_add(age_us / 1_000_000 * DRIFT_PPM),
            doubtful,
            node,
            pipeline: record.event.pipeline(),
            record: record.clone(),
        }
    }
}

/// A stream according to its caller's record.
struct Asked {
    pipeline: PipelineId,
    asked_us: u64,
    /// Time at which the caller received the host's answer.
    ready_us: Option<u64>,
}

impl Asked {
    /// Time of a host's event of this stream, moved by at most the event's uncertainty.
    fn bound(&self, entry: &Entry) -> u64 {
        let mut at_us = entry.at_us;
        if let (Event::StreamOpened { .. }, Some(ready_us)) = (&entry.record.event, self.ready_us) {
            at_us = at_us.min(ready_us.saturating_sub(1));
        }
        at_us = at_us.max(self.asked_us.saturating_add(1));
        let off_us = entry.give_or_take_us;
        let earliest = entry.at_us.saturating_sub(off_us);
        at_us.clamp(earliest, entry.at_us.saturating_add(off_us))
    }
}

/// Merges all records by time; each node's own records keep their order.
pub fn merge(answers: &[(NodeId, Answer)]) -> Vec<Entry> {
    // A common epoch: wall clocks are read to the millisecond, which must not separate nodes.
    let epoch_us = answers.first().map_or(0, |(_, answer)| answer.epoch_us());
    let line = |(node, answer): &(NodeId, Answer)| -> Vec<Entry> {
        let records = answer.page.records.iter();
        records
            .map(|record| answer.place(*node, record, epoch_us))
            .collect()
    };
    let mut lines: Vec<Vec<Entry>> = answers.iter().map(line).collect();
    // By caller, host and trace.
    let mut streams: HashMap<(NodeId, NodeId, StreamTrace), Asked> = HashMap::new();
    for entry in lines.iter().flatten() {
        match &entry.record.event {
            Event::StreamAsked {
                pipeline,
                host,
                trace,
                ..
            } => {
                let life = (entry.node, *host, *trace);
                streams.entry(life).or_insert(Asked {
                    pipeline: *pipeline,
                    asked_us: entry.at_us,
                    ready_us: None,
                });
            }
            Event::StreamReady { host, trace, .. } => {
                if let Some(asked) = streams.get_mut(&(entry.node, *host, *trace)) {
                    asked.ready_us.get_or_insert(entry.at_us);
                }
            }
            _ => {}
        }
    }
    for line in &mut lines {
        // The numbers give a node's own order: its clock may stand still, but not go back.
        let mut least_us = 0;
        for entry in line {
            if let Some((caller, trace)) = entry.record.event.hosted_stream()
                && let Some(asked) = streams.get(&(caller, entry.node, trace))
            {
                entry.pipeline = Some(asked.pipeline);
                entry.at_us = asked.bound(entry);
            }
            entry.at_us = entry.at_us.max(least_us);
            least_us = entry.at_us;
        }
    }
    let mut all: Vec<Entry> = lines.into_iter().flatten().collect();
    // Stable: at equal times, the node that was asked first comes first.
    all.sort_by_key(|entry| entry.at_us);
    all
}

/// Events of one pipeline: its own events on all nodes, the sessions that it used, and other events
/// of its nodes meanwhile that belong to no pipeline.
pub fn of_pipeline(all: &[Entry], pipeline: PipelineId) -> Vec<Entry> {
    let own = || all.iter().filter(|entry| entry.pipeline == Some(pipeline));
    let (Some(first), Some(last)) = (own().next(), own().next_back()) else {
        return Vec::new();
    };
    let mut nodes: Vec<NodeId> = own().map(|entry| entry.node).collect();
    let mut sessions = Vec::new();
    for entry in own() {
        if let Event::StreamAsked { host, trace, .. } = &entry.record.event {
            nodes.push(*host);
            sessions.push(trace.session);
        }
    }
    let during = first.at_us..=last.at_us;
    all.iter()
        .filter(|entry| {
            if let Some(of) = entry.pipeline {
                return of == pipeline;
            }
            match &entry.record.event {
                Event::SessionBegan { session, .. } | Event::SessionEnded { session, .. } => {
                    sessions.contains(session)
                }
                Event::StreamOpened { .. }
                | Event::StreamRefused { .. }
                | Event::StreamEnded { .. }
                | Event::PeerRefused { .. }
                | Event::ConnectionRefused { .. } => false,
                _ => nodes.contains(&entry.node) && during.contains(&entry.at_us),
            }
        })
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use hearthnet_transport::NodeId;
    use proptest::prelude::*;

    use super::*;
    use crate::node::flight::{Ring, SessionId, Stamp};

    const NOON: u64 = 1_750_000_000_000;

    fn who(n: u8) -> NodeId {
        NodeId::from_checked([n; 32])
    }

    fn pipeline(n: u64) -> PipelineId {
        PipelineId::from_parts(NOON, u128::from(n))
    }

    fn trace(stream: u32) -> StreamTrace {
        StreamTrace {
            session: SessionId::of_token(b"token"),
            stream,
            epoch: 0,
        }
    }

    fn asked(n: u64, host: NodeId, stream: u32) -> Event {
        Event::StreamAsked {
            pipeline: pipeline(n),
            host,
            shard: "m:0-1".into(),
            trace: trace(stream),
        }
    }

    fn opened(peer: NodeId, stream: u32) -> Event {
        Event::StreamOpened {
            peer,
            trace: trace(stream),
            layers: (0, 1),
        }
    }

    fn ready(host: NodeId) -> Event {
        Event::StreamReady {
            pipeline: pipeline(1),
            host,
            trace: trace(3),
        }
    }

    fn nodes(line: &[Entry]) -> Vec<NodeId> {
        line.iter().map(|entry| entry.node).collect()
    }

    /// Record of a node whose monotonic clock started `mono_ms` before noon and whose wall clock is
    /// `ahead_ms` ahead. Events are given by true time since noon. The node is asked at 10 000 ms
    /// and answers `there_ms` later, which arrives `back_ms` after that.
    fn answer(mono_ms: u64, ahead_ms: i64, trip: (u64, u64), events: &[(u64, Event)]) -> Answer {
        let stamp = |ms: u64| Stamp {
            unix_ms: (NOON + ms).saturating_add_signed(ahead_ms),
            mono_us: (mono_ms + ms) * 1000,
        };
        let true_time = |ms: u64| Stamp {
            unix_ms: NOON + ms,
            mono_us: ms * 1000,
        };
        let mut ring = Ring::new(1, stamp(0));
        for (ms, event) in events {
            ring.push(stamp(*ms), event.clone());
        }
        let (there_ms, back_ms) = trip;
        Answer {
            asked: true_time(10_000),
            heard: true_time(10_000 + there_ms + back_ms),
            page: ring.page(stamp(10_000 + there_ms), 0, 0, None),
            unreadable: 0,
            cut: false,
        }
    }

    #[test]
    fn a_wall_clock_that_is_hours_wrong_does_not_move_an_event() {
        let (caller, host) = (who(1), who(2));
        let there = [(105, opened(caller, 3))];
        let answers = [
            (caller, answer(0, 0, (0, 0), &[(100, asked(1, host, 3))])),
            (host, answer(77_000, -7_200_000, (1, 1), &there)),
        ];
        let line = merge(&answers);
        let times: Vec<u64> = line.iter().map(|e| e.at_us / 1000 - NOON).collect();
        assert_eq!(times, [100, 105]);
        assert_eq!(line[1].pipeline, Some(pipeline(1)));
        let clock = answers[1].1.clock();
        assert_eq!((clock.ahead_ms, clock.give_or_take_us), (-7_200_000, 1000));
    }

    #[test]
    fn a_proven_order_corrects_a_clock_estimate() {
        let (caller, host) = (who(1), who(2));
        // The whole round trip was the way there, so the middle is 20 ms too early.
        let answers = [
            (caller, answer(0, 0, (0, 0), &[(100, asked(1, host, 3))])),
            (host, answer(0, 0, (40, 0), &[(105, opened(caller, 3))])),
        ];
        assert_eq!(nodes(&merge(&answers)), [caller, host]);
    }

    #[test]
    fn a_stream_is_not_opened_after_its_caller_heard_so() {
        let (caller, host) = (who(1), who(2));
        let own = [(100, asked(1, host, 3)), (102, ready(host))];
        // The whole round trip was the way back, so the middle is 20 ms too late.
        let answers = [
            (caller, answer(0, 0, (0, 0), &own)),
            (host, answer(0, 0, (0, 40), &[(101, opened(caller, 3))])),
        ];
        assert_eq!(nodes(&merge(&answers)), [caller, host, caller]);
    }

    #[test]
    fn a_host_cannot_claim_events_of_another_hosts_pipeline() {
        let (caller, host, liar) = (who(1), who(2), who(3));
        let answers = [
            (caller, answer(0, 0, (0, 0), &[(100, asked(1, host, 3))])),
            // Claims a stream that this caller did not ask for.
            (liar, answer(0, 0, (0, 0), &[(101, opened(caller, 3))])),
            // Claims to have asked for a stream that is not its own.
            (who(4), answer(0, 0, (0, 0), &[(1, asked(9, host, 3))])),
            (host, answer(0, 0, (0, 0), &[(102, opened(caller, 3))])),
        ];
        let line = merge(&answers);
        let of = |node: NodeId| line.iter().find(|entry| entry.node == node).unwrap();
        assert_eq!(of(liar).pipeline, None);
        assert_eq!(of(host).pipeline, Some(pipeline(1)));
        assert_eq!(of_pipeline(&line, pipeline(1)).len(), 2);
    }

    #[test]
    fn impossible_times_are_marked_and_affect_no_other_node() {
        let (caller, host) = (who(1), who(2));
        let events = [(5, opened(caller, 1)), (6, opened(caller, 2))];
        let mut hostile = answer(0, 0, (1, 1), &events);
        hostile.page.records[0].at = Stamp {
            unix_ms: 32_503_680_000_000,
            mono_us: u64::MAX,
        };
        hostile.page.records[1].at = Stamp::default();
        hostile.page.began.mono_us = 1_000_000;
        let honest = answer(0, 0, (0, 0), &[(100, asked(1, host, 3))]);
        let line = merge(&[(caller, honest), (host, hostile)]);
        for entry in &line {
            assert!(entry.at_us <= (NOON + 10_010) * 1000, "{entry:?}");
            assert_eq!(entry.doubtful, entry.node == host);
        }
    }

    proptest! {
        /// For any clock errors and asymmetric round trips, events with an order that this node's
        /// record proves are shown in it.
        #[test]
        fn proven_orders_are_shown(
            trips in proptest::collection::vec((0u64..80, 0u64..80), 3),
            ahead in proptest::collection::vec(-10_000_000i64..10_000_000, 3),
        ) {
            let caller = who(0);
            let mut own = Vec::new();
            for n in 1..4u8 {
                own.push((100 * u64::from(n), asked(1, who(n), 3)));
                own.push((100 * u64::from(n) + 2, ready(who(n))));
            }
            let mut answers = vec![(caller, answer(0, 0, (0, 0), &own))];
            for (n, (trip, ahead)) in (1..4u8).zip(trips.into_iter().zip(ahead)) {
                let at = 100 * u64::from(n) + 1;
                let events = [(at, opened(caller, 3))];
                answers.push((who(n), answer(5000 * u64::from(n), ahead, trip, &events)));
            }
            let shown = nodes(&merge(&answers));
            let true_order = [0, 1, 0, 0, 2, 0, 0, 3, 0].map(who);
            prop_assert_eq!(shown, true_order);
        }

        #[test]
        fn any_answers_make_a_timeline(
            stamps in proptest::collection::vec(any::<[u64; 8]>(), 1..4),
            records in proptest::collection::vec((any::<[u64; 2]>(), 0u8..3), 0..40),
        ) {
            let answers: Vec<(NodeId, Answer)> = (0u8..).zip(&stamps).map(|(n, s)| {
                let stamp = |a, b| Stamp { unix_ms: a, mono_us: b };
                let records = records.iter().zip(1..).map(|(([unix_ms, mono_us], kind), seq)| Record {
                    seq,
                    at: Stamp { unix_ms: *unix_ms, mono_us: *mono_us },
                    times: 1,
                    event: match kind {
                        0 => asked(u64::from(n), who(1), 1),
                        1 => opened(who(0), 1),
                        _ => Event::Unknown,
                    },
                }).collect();
                let mut answer = answer(0, 0, (0, 0), &[]);
                answer.asked = stamp(s[0], s[1]);
                answer.page.now = stamp(s[2], s[3]);
                answer.heard = stamp(s[4], s[5]);
                answer.page.began = stamp(s[6], s[7]);
                answer.page.records = records;
                (who(n), answer)
            }).collect();
            let line = merge(&answers);
            prop_assert_eq!(line.len(), answers.iter().map(|(_, a)| a.page.records.len()).sum::<usize>());
            prop_assert!(line.is_sorted_by_key(|entry| entry.at_us));
            for (node, _) in &answers {
                let seqs: Vec<u64> = line.iter().filter(|e| e.node == *node).map(|e| e.record.seq).collect();
                prop_assert!(seqs.is_sorted());
            }
        }
    }
}
