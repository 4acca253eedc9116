use hearthnet_transport::{Code, MAX_NAME};
use proptest::prelude::*;

use super::*;
use crate::testing::id;

fn pipeline(n: u64) -> PipelineId {
    PipelineId::from_parts(1_750_000_000_000, u128::from(n))
}

fn aborted(n: u64) -> Event {
    Event::Aborted {
        pipeline: pipeline(n),
        code: "shard_unavailable".into(),
    }
}

fn refused(code: &str) -> Event {
    Event::ConnectionRefused {
        code: Code::parse(code).unwrap(),
    }
}

fn at(ms: u64) -> Stamp {
    Stamp {
        unix_ms: 1_750_000_000_000 + ms,
        mono_us: ms * 1000,
    }
}

fn who(n: u8) -> NodeId {
    NodeId::from_checked([n; 32])
}

fn opened(peer: NodeId, session: SessionId) -> Event {
    Event::StreamOpened {
        peer,
        trace: StreamTrace {
            session,
            stream: 1,
            epoch: 1,
        },
        layers: (0, 3),
    }
}

/// All records from the first on, page by page.
fn whole(ring: &Ring, now: Stamp) -> Vec<Record> {
    let (mut all, mut from) = (Vec::new(), 0);
    loop {
        let page = ring.page(now, from, 0, None);
        assert!(page.records.len() <= MAX_PAGE_RECORDS);
        all.extend(page.records);
        match page.next {
            Some(next) => {
                assert!(next > from, "a page goes on where the last one ended");
                from = next;
            }
            None => return all,
        }
    }
}

#[test]
fn strangers_cannot_wash_away_what_happened_to_a_pipeline() {
    let mut ring = Ring::new(1, at(0));
    ring.push(at(1), aborted(1));
    for n in 0..100_000 {
        ring.push(at(2), refused(&format!("code{n}")));
    }
    let all = whole(&ring, at(3));
    assert_eq!(all.first().unwrap().event, aborted(1));
    assert!(all.len() < 1000);
    assert_eq!(
        ring.page(at(3), 0, 0, None).forgotten + all.len() as u64,
        100_001
    );
}

#[test]
fn a_full_ring_stays_within_its_bytes_and_keeps_the_latest() {
    let mut ring = Ring::new(1, at(0));
    let long = "x".repeat(10_000);
    for n in 0..20_000 {
        ring.push(
            at(n),
            Event::HostFailed {
                pipeline: pipeline(n),
                host: who(7),
                shard: long.as_str().into(),
                code: Code::parse(&"x".repeat(MAX_NAME)).unwrap(),
            },
        );
    }
    let all = whole(&ring, at(20_000));
    let bytes: usize = all
        .iter()
        .map(|r| size_of_val(r) + MAX_NAME_BYTES + MAX_NAME)
        .sum();
    assert!(bytes <= 1 << 20, "{bytes} bytes");
    assert_eq!(all.last().unwrap().event.pipeline(), Some(pipeline(19_999)));
}

#[test]
fn the_same_event_again_is_counted() {
    let mut ring = Ring::new(1, at(0));
    for _ in 0..5 {
        ring.push(at(1), refused("tls_failed"));
    }
    ring.push(at(2), refused("other"));
    let all = whole(&ring, at(3));
    let times: Vec<u32> = all.iter().map(|record| record.times).collect();
    assert_eq!(times, [5, 1]);
}

#[test]
fn older_records_are_left_out_even_if_the_clock_was_set() {
    let mut ring = Ring::new(1, at(0));
    ring.push(at(0), aborted(1));
    // The clock is set forward by an hour between the two.
    let hour = 3_600_000;
    let set = |ms: u64| Stamp {
        unix_ms: at(ms).unix_ms + hour,
        ..at(ms)
    };
    ring.push(set(10_000), aborted(2));
    let now = set(11_000);
    let page = ring.page(now, 0, now.unix_ms - 5_000, None);
    let seen: Vec<_> = page.records.iter().map(|r| r.event.pipeline()).collect();
    assert_eq!(seen, [Some(pipeline(2))]);
    assert_eq!(
        ring.page(now, 0, now.unix_ms - 12_000, None).records.len(),
        2
    );
}

#[test]
fn a_caller_reads_what_concerns_it_and_of_no_other_caller() {
    let (mine, theirs) = (who(1), who(2));
    let session = SessionId::of_token(b"token");
    let of = |peer: NodeId| {
        [
            Event::SessionBegan {
                session,
                peer,
                purpose: "pipeline".into(),
            },
            opened(peer, session),
            Event::PeerRefused {
                peer,
                code: "token_expired".into(),
            },
        ]
    };
    let whole = [
        Event::ShardServing {
            shard: "m:0-3".into(),
        },
        Event::WeightsEvicted {},
    ];
    // Callers do not see the node's own calls to others.
    let own = [
        Event::HostLeaving {
            host: mine,
            within_ms: 5,
        },
        Event::PeerConnected { peer: mine },
        aborted(1),
        refused("not_tls"),
    ];
    let mut ring = Ring::new(1, at(0));
    let events = of(theirs).into_iter().chain(of(mine)).chain(own);
    for event in events.chain(whole.clone()) {
        ring.push(at(1), event);
    }
    let page = ring.page(at(2), 0, 0, Some(&mine));
    let seen: Vec<Event> = page.records.into_iter().map(|r| r.event).collect();
    let expected: Vec<Event> = of(mine).into_iter().chain(whole).collect();
    assert_eq!((seen, page.partial), (expected, true));
    let all = ring.page(at(2), 0, 0, None);
    assert_eq!((all.records.len(), all.partial), (12, false));
}

#[test]
fn a_kind_of_a_later_version_is_unknown_and_no_error() {
    let text = r#"{"seq":1,"at":{"unix_ms":5,"mono_us":6},"event":{"kind":"teleported","to":"x"}}"#;
    let record: Record = serde_json::from_str(text).unwrap();
    assert_eq!(record.event, Event::Unknown);
}

#[test]
fn a_session_has_one_name_on_both_sides_and_another_token_another_name() {
    let one = SessionId::of_token(b"token");
    assert_eq!(one, SessionId::of_token(b"token"));
    assert_ne!(one, SessionId::of_token(b"another"));
    let json = serde_json::to_string(&one).unwrap();
    assert_eq!(json.len(), 18);
    assert_eq!(serde_json::from_str::<SessionId>(&json).unwrap(), one);
}

proptest! {
    #[test]
    fn a_name_is_short_and_plain_whatever_it_was_made_of(text in ".{0,200}") {
        let name = Name::from(text.as_str());
        prop_assert!(name.as_str().len() <= MAX_NAME_BYTES);
        prop_assert!(name.as_str().bytes().all(|b| b.is_ascii_graphic()));
        let json = serde_json::to_string(&text).unwrap();
        prop_assert_eq!(serde_json::from_str::<Name>(&json).unwrap(), name);
    }

    #[test]
    fn pages_together_hold_every_record_once_and_in_order(
        kinds in proptest::collection::vec(0u8..3, 0..2000)
    ) {
        let mut ring = Ring::new(1, at(0));
        for (n, kind) in (0u64..).zip(&kinds) {
            let event = match kind {
                0 => aborted(n),
                1 => Event::PeerLost {
                    peer: id(n as u8),
                    code: Code::parse(&format!("n{n}")).unwrap(),
                },
                _ => opened(id(1), SessionId::of_token(&n.to_le_bytes())),
            };
            ring.push(at(n), event);
        }
        let all = whole(&ring, at(5000));
        let seqs: Vec<u64> = all.iter().map(|record| record.seq).collect();
        prop_assert_eq!(seqs, (1..=kinds.len() as u64).collect::<Vec<_>>());
        for record in all {
            let json = serde_json::to_string(&record).unwrap();
            prop_assert!(json.len() < 1024);
            prop_assert_eq!(serde_json::from_str::<Record>(&json).unwrap(), record);
        }
    }
}
