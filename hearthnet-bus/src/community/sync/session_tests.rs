//! Sessions in virtual time over a toy log of authors and numbers, without signatures.
//! `link_tests.rs` uses the real log.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use hearthnet_transport::CloseCode;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::budget::{Account, Budgets, Stored, SyncConfig};
use super::message::{MAX_BATCH_EVENTS, SyncMessage};
use super::session::{Done, SyncSession, WINDOW, Work};
use crate::CommunityId;
use crate::testing::id;

fn community() -> CommunityId {
    CommunityId::from(id(7))
}

/// Number of events per author. Events have a number and no content.
type Log = BTreeMap<u8, u64>;

fn event(author: u8, seq: u64) -> Bytes {
    let mut event = vec![author];
    event.extend_from_slice(&seq.to_be_bytes());
    event.into()
}

fn heads(log: &Log) -> Vec<u8> {
    log.iter()
        .flat_map(|(author, seq)| event(*author, *seq).to_vec())
        .collect()
}

fn read(event: &[u8]) -> Option<(u8, u64)> {
    let (author, seq) = event.split_first()?;
    Some((*author, u64::from_be_bytes(seq.try_into().ok()?)))
}

/// A side of a link.
struct Side {
    session: SyncSession,
    /// Events that the peer is believed to have.
    theirs: Log,
    /// Messages on their way to this side.
    inbox: VecDeque<Bytes>,
}

impl Side {
    fn new(config: &SyncConfig, now: u64) -> Side {
        Side {
            session: SyncSession::new(community(), config.clone(), now),
            theirs: Log::new(),
            inbox: VecDeque::new(),
        }
    }

    /// Does one piece of work against a log. Returns whether the log grew; `None` if there was no
    /// work.
    fn work(&mut self, log: &mut Log, now: u64) -> Option<bool> {
        let mut grew = false;
        let done = match self.session.poll_work(now)? {
            Work::Heads => Done::Heads(heads(log)),
            Work::Learn(heads) => {
                self.theirs = heads.chunks(9).filter_map(read).collect();
                Done::Learned(heads.len() % 9 == 0)
            }
            Work::Collect => {
                let mut events = Vec::new();
                let mut more = false;
                for (author, seq) in log.iter() {
                    let theirs = self.theirs.entry(*author).or_default();
                    while *theirs < *seq {
                        if events.len() == MAX_BATCH_EVENTS {
                            more = true;
                            break;
                        }
                        *theirs += 1;
                        events.push(event(*author, *theirs));
                    }
                }
                Done::Collected { events, more }
            }
            Work::Store(events) => {
                let mut stored = Stored::default();
                for (author, seq) in events.iter().filter_map(|event| read(event)) {
                    let have = log.entry(author).or_default();
                    if seq == *have + 1 {
                        *have = seq;
                        stored.accepted += 1;
                    } else if seq <= *have {
                        stored.known += 1;
                    } else {
                        stored.refused += 1;
                    }
                    let theirs = self.theirs.entry(author).or_default();
                    *theirs = seq.max(*theirs);
                }
                grew = stored.accepted > 0;
                Done::Stored(stored)
            }
        };
        self.session.handle_done(now, done);
        Some(grew)
    }
}

/// Nodes, with links between some of them.
struct Net {
    now: u64,
    config: SyncConfig,
    logs: Vec<Log>,
    links: Vec<([usize; 2], [Side; 2])>,
}

impl Net {
    fn new(nodes: usize) -> Net {
        Net {
            now: 1_000_000,
            config: SyncConfig::default(),
            logs: vec![Log::new(); nodes],
            links: Vec::new(),
        }
    }

    fn connect(&mut self, left: usize, right: usize) {
        self.links.push(([left, right], self.new_sides()));
    }

    /// Replaces the sessions of a link: messages on their way are lost.
    fn reconnect(&mut self, link: usize) {
        self.links[link].1 = self.new_sides();
    }

    fn new_sides(&self) -> [Side; 2] {
        [0, 1].map(|_| Side::new(&self.config, self.now))
    }

    fn write(&mut self, node: usize, events: u64) {
        *self.logs[node].entry(node as u8).or_default() += events;
        self.changed(node);
    }

    fn changed(&mut self, node: usize) {
        for (nodes, sides) in &mut self.links {
            for side in 0..2 {
                if nodes[side] == node {
                    sides[side].session.handle_change();
                }
            }
        }
    }

    /// Makes one step on one side of a link. Returns false if there was nothing to do.
    fn step(&mut self, link: usize, side: usize, deliver: bool) -> bool {
        let now = self.now;
        let (nodes, sides) = &mut self.links[link];
        let node = nodes[side];
        let [left, right] = sides;
        let (own, other) = if side == 0 {
            (left, right)
        } else {
            (right, left)
        };
        if deliver && let Some(message) = own.inbox.pop_front() {
            own.session.handle_message(now, &message);
            return true;
        }
        if let Some(message) = own.session.poll_transmit() {
            other.inbox.push_back(message);
            return true;
        }
        match own.work(&mut self.logs[node], now) {
            Some(true) => self.changed(node),
            Some(false) => {}
            None => return false,
        }
        true
    }

    /// Runs all sides until they are idle, without advancing the time.
    fn settle(&mut self) {
        for _ in 0..1_000_000 {
            let mut busy = false;
            for link in 0..self.links.len() {
                for side in 0..2 {
                    busy |= self.step(link, side, true);
                }
            }
            if !busy {
                return;
            }
        }
        panic!("it goes on for ever");
    }

    fn advance(&mut self, ms: u64) {
        self.now += ms;
        for (_, sides) in &mut self.links {
            sides
                .iter_mut()
                .for_each(|side| side.session.handle_timeout(self.now));
        }
    }

    fn session(&mut self, link: usize, side: usize) -> &mut SyncSession {
        &mut self.links[link].1[side].session
    }

    fn assert_in_sync(&self) {
        for log in &self.logs {
            assert_eq!(*log, self.logs[0]);
        }
        for (_, sides) in &self.links {
            for side in sides {
                assert_eq!(side.session.closed(), None);
                assert!(side.session.progress().in_sync, "{:?}", side.session);
            }
        }
    }
}

#[test]
fn two_nodes_exchange_their_missing_events() {
    let mut net = Net::new(2);
    net.write(0, 5_000);
    net.write(1, 3_000);
    net.connect(0, 1);
    net.settle();
    net.assert_in_sync();
    assert_eq!(net.logs[0], Log::from([(0, 5_000), (1, 3_000)]));
    let progress = net.session(0, 0).progress();
    assert_eq!((progress.sent, progress.received), (5_000, 3_000));
    assert_eq!((progress.accepted, progress.refused), (3_000, 0));
}

#[test]
fn new_events_travel_over_an_open_session_and_not_back() {
    let mut net = Net::new(3);
    net.connect(0, 1);
    net.connect(1, 2);
    net.settle();
    for round in 0..20 {
        net.write(round % 3, 1);
        net.settle();
        net.assert_in_sync();
    }
    // On a line of nodes, every event crosses every link once.
    for link in 0..2 {
        let sent: u64 = (0..2)
            .map(|side| net.session(link, side).progress().sent)
            .sum();
        assert_eq!(sent, 20);
    }
}

#[test]
fn an_offline_node_catches_up_and_its_own_events_arrive() {
    let mut net = Net::new(3);
    net.connect(0, 1);
    net.connect(1, 2);
    net.write(2, 10);
    net.settle();
    // The third node is disconnected for a week.
    net.links.pop();
    for _ in 0..7 * 24 {
        net.write(0, 20);
        net.write(1, 10);
        net.write(2, 1);
        net.advance(3_600_000);
        net.settle();
    }
    net.connect(2, 1);
    net.settle();
    net.assert_in_sync();
    assert_eq!(net.logs[2][&0], 20 * 7 * 24);
    assert_eq!(net.logs[0][&2], 10 + 7 * 24);
}

#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_was() {
    let mut net = Net::new(2);
    net.write(0, 50_000);
    let mut sent = 0;
    // The connection breaks many times.
    for _ in 0..40 {
        net.connect(0, 1);
        for _ in 0..30 {
            net.step(0, 0, true);
            net.step(0, 1, true);
        }
        sent += net.session(0, 0).progress().sent;
        net.links.clear();
    }
    net.connect(0, 1);
    net.settle();
    net.assert_in_sync();
    sent += net.session(0, 0).progress().sent;
    // At most a window is sent twice per break.
    assert!(sent <= 50_000 + 40 * (WINDOW * MAX_BATCH_EVENTS) as u64);
    assert!(sent < 100_000, "{sent}");
}

#[test]
fn a_new_node_with_three_peers_gets_the_whole_log() {
    let mut net = Net::new(4);
    net.write(0, 60_000);
    net.connect(0, 1);
    net.connect(0, 2);
    net.settle();
    net.links.clear();
    for peer in 0..3 {
        net.connect(3, peer);
    }
    let mut rounds = 0;
    while net.logs[3] != net.logs[0] {
        net.settle();
        net.advance(1_000);
        rounds += 1;
        assert!(rounds < 600);
    }
}

/// Runs the first link: the sender works, and the receiver only exchanges messages.
fn feed(net: &mut Net) -> &mut Side {
    net.step(0, 0, true);
    let (_, [sender, receiver]) = &mut net.links[0];
    if let Some(message) = receiver.inbox.pop_front() {
        receiver.session.handle_message(net.now, &message);
    }
    if let Some(message) = receiver.session.poll_transmit() {
        sender.inbox.push_back(message);
    }
    receiver
}

#[test]
fn nothing_is_sent_beyond_the_window() {
    let mut net = Net::new(2);
    net.write(0, 100_000);
    net.connect(0, 1);
    let now = net.now;
    // The receiver takes messages but has no time to store events.
    for _ in 0..1_000 {
        let receiver = feed(&mut net);
        if receiver.session.progress().received == 0 {
            receiver.work(&mut Log::new(), now);
        }
    }
    let progress = net.session(0, 0).progress();
    assert_eq!(progress.sent, (WINDOW * MAX_BATCH_EVENTS) as u64);
    assert_eq!(net.session(0, 1).closed(), None);
    // After the timeout, the sender gives up.
    net.advance(SyncConfig::default().ack_ms);
    let closed = net.session(0, 0).closed().unwrap();
    assert_eq!(closed.code, CloseCode::PipelineStalled);
}

#[test]
fn a_log_that_cannot_be_written_for_a_while_acknowledges_later() {
    let mut net = Net::new(2);
    net.write(0, 3_000);
    net.connect(0, 1);
    let (now, mut failures) = (net.now, 0);
    for _ in 0..200 {
        let session = &mut feed(&mut net).session;
        match session.poll_work(now) {
            Some(Work::Store(events)) => {
                session.handle_done(now, Done::Failed(Some(events)));
                failures += 1;
            }
            Some(other) => do_work(session, now, other, |_| unreachable!()),
            None => {}
        }
    }
    // Storing is neither retried at once nor given up.
    assert_eq!(failures, 1);
    assert_eq!(net.session(0, 1).poll_timeout(), Some(net.now + 5_000));
    assert!(!net.session(0, 0).progress().in_sync);
    net.advance(5_000);
    net.settle();
    net.assert_in_sync();
}

// ------------------------------------------------------------------ a hostile peer

/// Open session with a peer whose messages the test makes.
fn attacked() -> SyncSession {
    let mut session = SyncSession::new(community(), SyncConfig::default(), 0);
    tell(&mut session, hello());
    assert_eq!(session.closed(), None);
    session
}

/// Does a piece of work with an empty log, in which storing events has this result.
fn do_work(session: &mut SyncSession, now: u64, work: Work, store: impl FnOnce(usize) -> Stored) {
    let done = match work {
        Work::Heads => Done::Heads(Vec::new()),
        Work::Learn(_) => Done::Learned(true),
        Work::Collect => Done::Collected {
            events: Vec::new(),
            more: false,
        },
        Work::Store(events) => Done::Stored(store(events.len())),
    };
    session.handle_done(now, done);
}

/// Does all work at time 0. Returns the number of heads that were processed.
fn do_all(session: &mut SyncSession, mut store: impl FnMut(usize) -> Stored) -> usize {
    let mut learned = 0;
    while let Some(work) = session.poll_work(0) {
        learned += usize::from(matches!(work, Work::Learn(_)));
        do_work(session, 0, work, &mut store);
    }
    learned
}

fn hello() -> SyncMessage {
    SyncMessage::Hello {
        version: 1,
        community: *community().as_bytes(),
    }
}

fn tell(session: &mut SyncSession, message: SyncMessage) {
    session.handle_message(0, &message.encode());
}

fn batch(number: u64, events: usize) -> SyncMessage {
    SyncMessage::Events {
        number,
        events: vec![event(1, 1); events],
    }
}

fn even(round: u64) -> SyncMessage {
    SyncMessage::Even { round }
}

fn ack(number: u64) -> SyncMessage {
    SyncMessage::Ack {
        number,
        accepted: 0,
        refused: 0,
    }
}

fn their_heads(round: u64) -> SyncMessage {
    SyncMessage::Heads {
        round,
        heads: Bytes::new(),
    }
}

#[test]
fn each_broken_rule_ends_the_session_with_its_code() {
    let beyond_the_window = [1, 2, 3, 4, 5].map(|number| batch(number, 1));
    let cases: [(&[SyncMessage], CloseCode); 11] = [
        (&[hello()], CloseCode::ProtocolState),
        (&[batch(2, 1)], CloseCode::FrameSequence),
        (&[batch(1, 1), batch(1, 1)], CloseCode::FrameSequence),
        (&beyond_the_window, CloseCode::CreditOverrun),
        (&[ack(1)], CloseCode::CreditAck),
        (&[ack(u64::MAX)], CloseCode::CreditAck),
        (&[even(1)], CloseCode::ProtocolState),
        (&[even(0)], CloseCode::ProtocolState),
        (&[their_heads(2)], CloseCode::ProtocolState),
        (&[their_heads(1), their_heads(1)], CloseCode::ProtocolState),
        (&[their_heads(0)], CloseCode::ProtocolState),
    ];
    for (messages, code) in cases {
        let mut session = attacked();
        for message in messages {
            tell(&mut session, message.clone());
        }
        let closed = session.closed().map(|violation| violation.code);
        assert_eq!(closed, Some(code), "{messages:?}");
        // A closed session does nothing.
        assert_eq!(session.poll_transmit(), None);
        assert_eq!(session.poll_work(0), None);
        assert_eq!(session.poll_timeout(), None);
    }
    let mut session = attacked();
    session.handle_message(0, &Bytes::from_static(b"\x82\x05\x01"));
    assert_eq!(session.closed().unwrap().code, CloseCode::BodyMalformed);
}

#[test]
fn only_a_valid_hello_in_time_opens_a_session() {
    let elsewhere = SyncMessage::Hello {
        version: 1,
        community: [9; 32],
    };
    let newer = SyncMessage::Hello {
        version: 2,
        community: *community().as_bytes(),
    };
    for (message, code) in [
        (elsewhere, CloseCode::Unauthorized),
        (newer, CloseCode::VersionUnsupported),
        (their_heads(1), CloseCode::ProtocolState),
        (batch(1, 1), CloseCode::ProtocolState),
    ] {
        let mut session = SyncSession::new(community(), SyncConfig::default(), 0);
        tell(&mut session, message);
        assert_eq!(session.closed().unwrap().code, code);
    }
    let mut session = SyncSession::new(community(), SyncConfig::default(), 0);
    assert_eq!(session.poll_timeout(), Some(10_000));
    session.handle_timeout(10_000);
    assert_eq!(session.closed().unwrap().code, CloseCode::PipelineStalled);
}

#[test]
fn a_flood_of_heads_ends_the_session() {
    let mut session = attacked();
    let mut looked_at = 0;
    for round in 1..100 {
        tell(&mut session, their_heads(round));
        looked_at += do_all(&mut session, |_| panic!("nothing to store"));
    }
    assert_eq!(session.closed().unwrap().code, CloseCode::FrameRate);
    assert_eq!(looked_at, 8);
}

/// Number of events of a flooding peer that are stored within a minute.
fn flood(stored: impl Fn(usize) -> Stored) -> u64 {
    let mut session = attacked();
    let mut number = 0;
    let mut events = 0;
    for second in 0..60 {
        let now = second * 1000;
        for _ in 0..10_000 {
            match session.poll_work(now) {
                Some(work) => do_work(&mut session, now, work, |batch| {
                    events += batch as u64;
                    stored(batch)
                }),
                None if session.poll_timeout().is_some_and(|at| at > now) && number > 0 => break,
                None => {}
            }
            let waiting = number - events / MAX_BATCH_EVENTS as u64;
            if waiting < WINDOW as u64 {
                number += 1;
                session.handle_message(now, &batch(number, MAX_BATCH_EVENTS).encode());
            }
        }
        assert_eq!(session.closed(), None);
    }
    events
}

#[test]
fn a_flood_is_slowed_to_the_budget_and_one_of_known_events_even_more() {
    let config = SyncConfig::default();
    let all_new = flood(|events| Stored {
        accepted: events as u64,
        ..Stored::default()
    });
    // The events of this test are small: one unit each, and nine for their bytes.
    let most = config.budget + 60 * config.budget_per_second;
    assert!(all_new <= most, "{all_new}");
    assert!(all_new > config.budget, "{all_new}");
    let all_known = flood(|events| Stored {
        known: events as u64,
        ..Stored::default()
    });
    assert!(all_known <= most / 5 + 2_048, "{all_known}");
}

#[test]
fn a_reconnecting_peer_gets_no_fresh_budget() {
    let config = SyncConfig::default();
    let peer = id(66);
    let account = Account {
        budgets: Arc::new(Mutex::new(Budgets::new(&config))),
        peer,
        counted: peer,
    };
    let (mut refused, mut looked_at) = (0, 0);
    for _ in 0..200 {
        let mut session = attacked().on(account.clone());
        tell(&mut session, their_heads(1));
        for number in 1..=WINDOW as u64 {
            tell(&mut session, batch(number, MAX_BATCH_EVENTS));
        }
        looked_at += do_all(&mut session, |events| {
            refused += events as u64;
            Stored {
                refused: events as u64,
                ..Stored::default()
            }
        });
        // In debt, the session waits and is not closed.
        assert_eq!(session.closed(), None);
        assert!(session.poll_timeout().is_some());
    }
    assert!(
        refused <= config.budget / 50 + 2 * MAX_BATCH_EVENTS as u64,
        "{refused}"
    );
    assert!(looked_at < 10, "{looked_at}");
}

#[test]
fn a_hostile_event_ends_the_session() {
    let mut session = attacked();
    tell(&mut session, batch(1, 3));
    do_all(&mut session, |_| Stored {
        hostile: Some(CloseCode::InvalidSignature),
        ..Stored::default()
    });
    assert_eq!(session.closed().unwrap().code, CloseCode::InvalidSignature);
}

proptest! {
    #[test]
    fn every_interleaving_and_every_partition_ends_with_identical_logs(
        written in prop::collection::vec((0usize..4, 1u64..3_000), 1..12),
        choices in prop::collection::vec((0u8..8, 0usize..4, 0usize..2, any::<bool>()), 50..400),
    ) {
        let mut net = Net::new(4);
        let mut written = written.into_iter();
        // A ring, so that events arrive by two routes.
        let ring = |net: &mut Net| (0..4).for_each(|node| net.connect(node, (node + 1) % 4));
        ring(&mut net);
        for (what, link, side, deliver) in choices {
            match what {
                0 => if let Some((node, events)) = written.next() {
                    net.write(node, events);
                },
                1 => net.reconnect(link),
                2 => net.advance(700),
                _ => { net.step(link, side, deliver); }
            }
        }
        // In any case, the remaining sessions finish the work, and new ones replace closed ones.
        for link in 0..4 {
            if (0..2).any(|side| net.session(link, side).closed().is_some()) {
                net.reconnect(link);
            }
        }
        net.settle();
        for _ in 0..10 {
            net.advance(60_000);
            net.settle();
        }
        net.assert_in_sync();
    }

    #[test]
    fn arbitrary_messages_never_panic(
        messages in prop::collection::vec(
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from),
                (0u64..4, 1usize..4).prop_map(|(number, events)| batch(number, events).encode()),
                (0u64..4).prop_map(|number| ack(number).encode()),
                (0u64..4).prop_map(|round| even(round).encode()),
                (0u64..4).prop_map(|round| their_heads(round).encode()),
            ],
            0..20,
        ),
        greeted in any::<bool>(),
    ) {
        let mut session = SyncSession::new(community(), SyncConfig::default(), 0);
        if greeted {
            tell(&mut session, hello());
        }
        for (now, message) in messages.iter().enumerate() {
            session.handle_message(now as u64, message);
            session.handle_timeout(now as u64);
            let _ = (session.poll_transmit(), session.poll_work(now as u64), session.progress());
        }
    }
}
