//! The order of delivery influences neither the state nor the stored events.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::disputes::{disputed, judged};
use super::*;

/// Next event of an author.
#[derive(Debug, Clone)]
struct Step {
    author: u8,
    kind: u8,
    about: u8,
    level: Level,
    number: u64,
    /// Distance of the Lamport time from the author's last event.
    gap: u64,
    /// Replaces the author's last event by another one (a fork) and continues from it.
    again: bool,
}

fn level() -> impl Strategy<Value = Level> {
    prop::sample::select(vec![Level::Member, Level::Trusted, Level::Anchor])
}

fn step() -> impl Strategy<Value = Step> {
    (
        0..6u8,
        0..15u8,
        1..6u8,
        level(),
        0..5u64,
        1..6u64,
        prop::bool::weighted(0.06),
    )
        .prop_map(|(author, kind, about, level, number, gap, again)| Step {
            author,
            kind,
            about,
            level,
            number,
            gap,
            again,
        })
}

fn body(step: &Step) -> Body {
    // Only few invites, so that admissions match them.
    let invite = 50 + u8::try_from(step.number % 3).unwrap();
    let level = [Level::Member, Level::Trusted, Level::Anchor][usize::from(invite - 50)];
    match step.kind {
        0 | 1 => invited(invite, level, 2),
        2..5 => admitted(invite, step.about, level),
        5 => Body::LevelChanged {
            node: id(step.about),
            level: step.level,
            last_seq: (step.gap > 1).then_some(step.number),
        },
        6 => revoked(step.about, step.number),
        7 => Body::PolicyChanged(Policy {
            research: step.number.is_multiple_of(2),
            who_may_invite: step.level,
        }),
        9 | 10 => Body::ModelAdopted(Adoption {
            layers: u32::from(step.about),
            ..adoption(invite)
        }),
        11 => dropped(invite),
        13 => disputed(
            u8::try_from(step.gap).unwrap(),
            step.about,
            (step.number > 2).then_some(1 + step.about % 5),
        ),
        14 => {
            use Finding::{Accused, Both, None, Withdrawn, Witness};
            let finding = [Accused, Witness, Both, None, Withdrawn];
            let finding = finding[usize::try_from(step.number).unwrap()];
            judged(u8::try_from(step.gap).unwrap(), step.about, finding)
        }
        12 => Body::NodeGave(Gave {
            day: NOW / DAY - 1 + step.gap.min(2),
            minutes: step.number,
            ..gave(step.number)
        }),
        _ => Body::InviteWithdrawn {
            invite: id(invite),
            // No list, an empty one, or some nodes that may have joined by the invite.
            members: (step.gap > 2).then(|| {
                (0..step.number)
                    .map(|n| id(u8::try_from(n).unwrap()))
                    .collect()
            }),
        },
    }
}

/// Events of a small community with many conflicts. Author 0 is the root.
fn events(steps: &[Step]) -> Vec<Vec<u8>> {
    let mut authors: Vec<_> = (0..6u8)
        .map(|i| Author::new(if i == 0 { root() } else { key(i) }))
        .collect();
    let mut all = vec![authors[0].make(Body::CommunityCreated {
        name: "Elm Street".into(),
        policy: Policy::default(),
        founder: id(1),
    })];
    let mut before: Vec<(u64, EventHash, u64)> = vec![(0, EventHash::ZERO, 0); 6];
    for step in steps {
        let i = usize::from(step.author);
        let author = &mut authors[i];
        if step.again && author.seq > 1 {
            (author.seq, author.prev, author.lamport) = before[i];
        }
        let last = (author.seq, author.prev, author.lamport);
        let event = Event {
            lamport: author.lamport + step.gap,
            ..author.draft(body(step))
        };
        all.push(author.sign(&event));
        before[i] = last;
    }
    all
}

/// Expected chain length and fork of each author, computed from the whole set at once, as in the
/// specification.
fn expected(all: &[Vec<u8>]) -> BTreeMap<NodeId, (u64, Option<u64>)> {
    let mut places: BTreeMap<NodeId, BTreeMap<u64, BTreeMap<EventHash, Event>>> = BTreeMap::new();
    for raw in all {
        let event = Event::decode_stored(raw).unwrap();
        let hash = EventHash::of(raw).unwrap();
        places
            .entry(event.author)
            .or_default()
            .entry(event.seq)
            .or_default()
            .insert(hash, event);
    }
    let chain = |places: &BTreeMap<u64, BTreeMap<EventHash, Event>>| {
        let mut last = (EventHash::ZERO, 0);
        for seq in 1.. {
            let Some(here) = places.get(&seq) else {
                return (seq - 1, None);
            };
            let (hash, event) = here.first_key_value().unwrap();
            let Lane::Durable { prev } = event.lane else {
                unreachable!()
            };
            if here.len() > 1 || prev != last.0 || event.lamport <= last.1 {
                return (seq - 1, Some(seq));
            }
            last = (*hash, event.lamport);
        }
        unreachable!()
    };
    places
        .into_iter()
        .map(|(author, places)| (author, chain(&places)))
        .collect()
}

fn deliver(log: &EventLog, events: &[Vec<u8>], batch: usize) {
    for batch in events.chunks(batch) {
        log.receive(batch, id(99), NOW).unwrap();
    }
}

/// Syncs both ways until nothing is sent. Returns the number of sent events.
fn settle(a: &EventLog, b: &EventLog) -> usize {
    let mut sent = 0;
    for _round in 0..20 {
        match sync(a, b, NOW) + sync(b, a, NOW) {
            0 => return sent,
            now => sent += now,
        }
    }
    panic!("the logs never agree: {:#?} {:#?}", a.heads(), b.heads());
}

/// Permutation determined by a seed.
fn shuffled<T: Clone>(items: &[T], mut seed: u64) -> Vec<T> {
    let mut items = items.to_vec();
    for i in (1..items.len()).rev() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        items.swap(i, usize::try_from(seed >> 33).unwrap() % (i + 1));
    }
    items
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_order_any_batches_and_repetitions_give_the_same_state(
        steps in prop::collection::vec(step(), 5..40), seed: u64, batch in 1usize..12,
    ) {
        let all = events(&steps);
        let straight = Home::joining();
        deliver(&straight.log, &all, all.len());
        let mixed = Home::joining();
        let order = shuffled(&all, seed);
        deliver(&mixed.log, &order, batch);
        // Delivering everything again changes nothing.
        let hash = mixed.log.state().state_hash();
        let again = mixed.log.receive(&all, id(99), NOW).unwrap();
        prop_assert_eq!(again.accepted, Vec::<usize>::new());
        prop_assert_eq!(mixed.log.state().state_hash(), hash);

        mixed.assert_same(&straight);

        let expected = expected(&all);
        for (author, head) in &straight.log.heads().authors {
            let (seq, fork) = expected[author];
            prop_assert_eq!((head.seq, head.fork.map(|f| f.seq)), (seq, fork));
        }
        assert_sound(&mixed.log);
    }

    #[test]
    fn partitions_heal_to_the_same_log_in_any_order_of_syncs(
        steps in prop::collection::vec(step(), 5..40), sides in prop::collection::vec(0..3u8, 40),
    ) {
        let all = events(&steps);
        let whole = Home::joining();
        deliver(&whole.log, &all, all.len());
        // Each event is delivered to one of three nodes; the root's first event to all.
        let split = || -> Vec<Home> {
            (0..3u8)
                .map(|side| {
                    let home = Home::joining();
                    deliver(&home.log, &all[..1], 1);
                    let mine: Vec<_> = all[1..]
                        .iter()
                        .zip(&sides)
                        .filter(|(_, s)| **s == side)
                        .map(|(raw, _)| raw.clone())
                        .collect();
                    deliver(&home.log, &mine, 4);
                    home
                })
                .collect()
        };
        for meetings in [[(0, 1), (1, 2)], [(2, 1), (0, 2)]] {
            let homes = split();
            // If the events of a chain alternate between the sides, each round fills only one hole.
            let mut rounds = 0..=all.len();
            let heal = || meetings.map(|(a, b)| settle(&homes[a].log, &homes[b].log));
            while heal() != [0, 0] {
                prop_assert!(rounds.next().is_some(), "the logs never agree");
            }
            // Events that only a stranger's log has, or beyond a hole that no log can fill, are not
            // passed on and have no effect.
            for home in &homes {
                home.assert_same(&homes[0]);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic_a_decoder(
        bytes in prop::collection::vec(any::<u8>(), 0..400), at: prop::sample::Index, to: u8,
    ) {
        crate::fuzzing::log_event(&bytes);
        crate::fuzzing::log_heads(&bytes);
        let mut event = events(&[]).remove(0);
        let i = at.index(event.len());
        event[i] = to;
        crate::fuzzing::log_event(&event);
        crate::fuzzing::log_event(&event[..i]);
    }
}
