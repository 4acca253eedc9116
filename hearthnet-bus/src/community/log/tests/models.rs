//! Adopted models, and measurements of nodes.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::attacks::two_anchors;
use super::*;

fn measured(memory_bytes: u64) -> Measured {
    Measured {
        links: vec![LinkSpeed {
            node: id(3),
            kbit_s: 940_000,
            delay_us: 180,
        }],
        models: vec![ModelSpeed {
            head_us: 4000,
            step_us: 90,
            weights: [7; 32],
            layer_us: 900,
            prefill_row_us: 300,
        }],
        running_s: 60,
        memory_bytes,
        online_permille: 990,
    }
}

fn raw_body(kind: &str, slot: Option<&str>, bytes: Vec<u8>) -> Body {
    Body::Unknown {
        kind: kind.into(),
        slot: slot.map(str::to_owned),
        bytes,
    }
}

fn names(home: &Home) -> Vec<String> {
    let state = home.log.state();
    state.models().iter().map(|it| it.name.clone()).collect()
}

#[test]
fn only_anchors_and_the_root_adopt_and_drop_models() {
    let home = Home::new();
    home.admit(2, Level::Member);
    home.admit(3, Level::Trusted);
    home.append(1, adopted(1));
    for author in [2, 3, 9] {
        home.refuses(author, adopted(2), "unauthorized");
        home.refuses(author, dropped(1), "unauthorized");
    }
    // Their events are stored if a peer sends them, and have no effect.
    let state = home.log.state();
    for author in [2, 3] {
        let mut author = Author::after(90, author);
        home.takes(&[author.make(adopted(2)), author.make(dropped(1))]);
    }
    assert_eq!(home.log.state(), state);
    assert_eq!(names(&home), ["model 1"]);
    home.append(ROOT, adopted(2));
    home.append(ROOT, dropped(1));
    assert_eq!(names(&home), ["model 2"]);
    assert_eq!(home.log.state().model(&[2; 32]), Some(&adoption(2)));
    assert_eq!(home.log.state().model(&[1; 32]), None);
    home.replica();
    assert_sound(&home.log);
}

#[test]
fn another_adoption_of_the_same_weights_replaces_the_first() {
    let home = Home::new();
    home.append(1, adopted(1));
    let corrected = Adoption {
        sources: vec!["https://models.example/1.gguf".into()],
        ..adoption(1)
    };
    home.append(1, Body::ModelAdopted(corrected.clone()));
    assert_eq!(home.log.state().models(), [&corrected]);
    home.replica();
}

#[test]
fn models_are_listed_by_name_and_then_by_weights() {
    let home = Home::new();
    for (weights, name) in [(1, "b"), (3, "a"), (2, "a")] {
        home.append(
            1,
            Body::ModelAdopted(Adoption {
                name: name.into(),
                ..adoption(weights)
            }),
        );
    }
    let state = home.log.state();
    let listed: Vec<u8> = state.models().iter().map(|it| it.weights[0]).collect();
    assert_eq!(listed, [2, 3, 1]);
}

#[test]
fn a_seventeenth_model_needs_another_to_be_dropped_first() {
    let home = Home::new();
    let hash = home.log.state().state_hash();
    for n in 0..16 {
        home.append(1, adopted(n));
    }
    let full = home.refused(1, adopted(16));
    assert_eq!(full.code(), "model_limit");
    assert!(full.to_string().contains("drop one first"), "{full}");
    // An adopted model can be corrected all the same.
    home.append(1, adopted(3));
    home.append(1, dropped(3));
    home.append(1, adopted(16));
    assert_eq!(home.log.state().models().len(), 16);
    home.refuses(1, dropped(3), "model_not_adopted");
    home.replica();
    let home = home.reopened();
    assert_eq!(home.log.state().models().len(), 16);
    // A community without models has the hash that it had before it adopted some.
    assert_ne!(home.log.state().state_hash(), hash);
    for n in (0..17).filter(|n| *n != 3) {
        home.append(1, dropped(n));
    }
    assert_eq!(home.log.state().state_hash(), hash);
}

#[test]
fn anchors_that_adopt_too_many_models_at_once_agree_on_sixteen() {
    let (home, mut me, root) = two_anchors();
    let other = home.replica();
    let mut second = Author::after(root.lamport, 2);
    me.lamport = root.lamport;
    let mine: Vec<_> = (0..12).map(|n| me.make(adopted(n))).collect();
    let theirs: Vec<_> = (12..24).map(|n| second.make(adopted(n))).collect();
    home.takes(&mine);
    other.takes(&theirs);
    sync(&home.log, &other.log, NOW);
    sync(&other.log, &home.log, NOW);
    home.assert_same(&other);
    // By Lamport time: eight of each.
    let state = home.log.state();
    let from_one = (0..12).filter(|n| state.model(&[*n; 32]).is_some()).count();
    assert_eq!((state.models().len(), from_one), (16, 8));
}

#[test]
fn a_demoted_or_revoked_anchor_cannot_adopt_and_drop_models_in_the_past() {
    for end in [level_of(2, Level::Trusted, 2), revoked(2, 2)] {
        let (home, _, mut root) = two_anchors();
        let mut former = Author::after(root.lamport, 2);
        home.takes(&[former.make(adopted(1)), former.make(adopted(2))]);
        // Leaves room before the loss of the level for backdated events.
        root.lamport = 100;
        let second = home.replica();
        let end = [root.make(end)];
        home.takes(&end);
        let state = home.log.state();
        // Adoptions that the root had seen stay, as a change of the policy would.
        assert_eq!(names(&home), ["model 1", "model 2"]);
        let backdated = [former.make(adopted(3)), former.make(dropped(1))];
        assert!(former.lamport < 100);
        home.takes(&backdated);
        assert_eq!(home.log.state(), state);
        // The second node gets the backdated events first. There they have an effect for a while.
        second.takes(&backdated);
        assert_eq!(names(&second), ["model 2", "model 3"]);
        second.takes(&end);
        home.assert_same(&second);
        assert_sound(&second.log);
        assert_eq!(home.log.verify().unwrap().void[&id(2)], 2);
    }
}

/// Removes an entry of a map.
fn without(map: &mut ciborium::Value, name: &str) {
    let map = map.as_map_mut().unwrap();
    let before = map.len();
    map.retain(|(key, _)| key.as_text() != Some(name));
    assert_eq!(map.len() + 1, before, "{name}");
}

#[test]
fn a_snapshot_of_rules_without_models_is_not_used() {
    let home = Home::new();
    let mut me = founder();
    let mut events = vec![me.make(adopted(1))];
    events.extend((0..600).map(|_| me.make(note(vec![0xa0]))));
    home.takes(&events);
    let state = home.log.state();
    let mut late = home.root_after(549);
    let home = home.reopened();
    assert_eq!(home.log.state(), state);
    let path = home.log.path().to_owned();
    let dir = home.closed();
    // As a program stores it for which `model.adopt` is an unknown kind.
    let conn = rusqlite::Connection::open(&path).unwrap();
    let fold: Vec<u8> = conn
        .query_row("SELECT fold FROM snapshots", [], |row| row.get(0))
        .unwrap();
    let mut fold: ciborium::Value = ciborium::from_reader(fold.as_slice()).unwrap();
    without(&mut fold, "rules");
    for (key, value) in fold.as_map_mut().unwrap() {
        if key.as_text() == Some("state") {
            without(value, "models");
        }
    }
    let mut bytes = Vec::new();
    ciborium::into_writer(&fold, &mut bytes).unwrap();
    let sum = Sha256::digest(&bytes).to_vec();
    conn.execute("UPDATE snapshots SET fold = ?1, sum = ?2", (bytes, sum))
        .unwrap();
    drop(conn);
    let home = Home::opened(dir);
    assert_eq!(home.log.state(), state);
    assert_sound(&home.log);
    // The next late event replaces it.
    home.takes(&[late.make(policy(true))]);
    assert!(home.log.is_consistent());
    assert_eq!(names(&home), ["model 1"]);
    let sql = "SELECT group_concat(folded) FROM snapshots";
    let conn = rusqlite::Connection::open(&path).unwrap();
    let folded: String = conn.query_row(sql, [], |row| row.get(0)).unwrap();
    assert_eq!(folded, "603");
}

/// Code with which every node refuses an event with this body; empty if it accepts the event.
fn refusal(body: Body) -> String {
    let raw = match body.slot() {
        None => founder().make(body),
        Some(_) => founder().say(1, NOW, body),
    };
    let refused = Event::verify(&raw).err();
    refused.map_or_else(String::new, |why| why.code().to_string())
}

/// Checks that no node writes an event with this body, and that every node refuses one.
#[track_caller]
fn assert_malformed(body: Body, change: usize) {
    let bytes = body.encode().unwrap();
    let sent = raw_body(body.kind(), body.slot().as_deref(), bytes);
    let own = Home::new().refused(1, body);
    assert_eq!(own.code(), "log_malformed", "change {change}");
    assert_eq!(refusal(sent), "log_malformed", "change {change}");
}

#[test]
fn the_largest_adoption_fits_and_everything_beyond_its_limits_is_refused() {
    let largest = Adoption {
        name: "n".repeat(64),
        layers: 4096,
        sources: vec!["s".repeat(512); 8],
        file_bytes: MAX_NUMBER,
        head_bytes: 64 << 20,
        manifest_bytes: 8 << 20,
        ..adoption(1)
    };
    assert_eq!(refusal(Body::ModelAdopted(largest.clone())), "");
    let changes: [fn(&mut Adoption); 14] = [
        |it| it.name = String::new(),
        |it| it.name.push('n'),
        |it| it.name = "two\nlines".into(),
        |it| it.layers = 0,
        |it| it.layers = 4097,
        |it| it.sources.push("s".into()),
        |it| it.sources[7].push('s'),
        |it| it.sources[0] = String::new(),
        |it| it.sources[0] = "hf:\u{1b}[2J".into(),
        |it| it.file_bytes = it.head_bytes,
        |it| it.file_bytes = MAX_NUMBER + 1,
        |it| it.head_bytes = 0,
        |it| it.head_bytes += 1,
        |it| it.manifest_bytes += 1,
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut it = largest.clone();
        change(&mut it);
        assert_malformed(Body::ModelAdopted(it), n);
    }
}

#[test]
fn the_largest_measurement_fits_and_everything_beyond_its_limits_is_refused() {
    let link = |n: u8| LinkSpeed {
        node: id(n),
        kbit_s: u32::MAX,
        delay_us: u32::MAX,
    };
    let model = |n: u8| ModelSpeed {
        head_us: u32::MAX,
        step_us: u32::MAX,
        weights: [n; 32],
        layer_us: u32::MAX,
        prefill_row_us: u32::MAX,
    };
    let largest = Measured {
        links: (1..=32).map(link).collect(),
        models: (1..=8).map(model).collect(),
        running_s: u32::MAX,
        memory_bytes: MAX_NUMBER,
        online_permille: 1000,
    };
    let body = Body::NodeMeasured(largest.clone());
    assert!(body.encode().unwrap().len() < MAX_BODY_BYTES);
    assert_eq!(refusal(body), "");
    let changes: [fn(&mut Measured); 6] = [
        |it| {
            it.links.push(LinkSpeed {
                node: id(40),
                ..it.links[0]
            });
        },
        |it| it.links[1] = it.links[0],
        |it| {
            it.models.push(ModelSpeed {
                weights: [40; 32],
                ..it.models[0]
            });
        },
        |it| it.models[1] = it.models[0],
        |it| it.memory_bytes += 1,
        |it| it.online_permille += 1,
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut it = largest.clone();
        change(&mut it);
        assert_malformed(Body::NodeMeasured(it), n);
    }
    // A key that is no node id.
    let mut it = largest;
    it.links[0].node = NodeId::from_checked([0; 32]);
    assert_eq!(refusal(Body::NodeMeasured(it)), "invalid_signature");
}

#[test]
fn bodies_that_are_not_the_canonical_map_are_refused() {
    let bodies = [
        adopted(1),
        dropped(1),
        Body::NodeMeasured(measured(1 << 30)),
    ];
    for body in bodies {
        let (kind, slot) = (body.kind().to_owned(), body.slot());
        let code = |bytes: Vec<u8>| refusal(raw_body(&kind, slot.as_deref(), bytes));
        let good = body.encode().unwrap();
        assert_eq!(code(good.clone()), "", "{kind}");
        for end in 0..good.len() {
            assert_eq!(code(good[..end].to_vec()), "log_malformed", "{kind}");
        }
        let mut longer = good.clone();
        longer.push(0xa0);
        // A map of one more entry, and one that declares 2^64 - 1 of them.
        let mut further = good.clone();
        further[0] += 1;
        further.extend(b"\x61z\x00");
        let huge = [&[0xbb; 1][..], &[0xff; 8], &good[1..]].concat();
        for bytes in [
            longer,
            further,
            huge,
            vec![0xa0],
            vec![0x80],
            vec![0xff; 64],
        ] {
            assert_eq!(code(bytes), "log_malformed", "{kind}");
        }
        // In another slot or in the other lane.
        let elsewhere = match slot {
            None => raw_body(&kind, Some("measured"), good),
            Some(_) => raw_body(&kind, None, good),
        };
        assert_eq!(refusal(elsewhere), "log_malformed", "{kind}");
    }
    // Lists that declare more items than the body has.
    let mut links = vec![0xa5, 0x65];
    links.extend(b"links\x9b\xff\xff\xff\xff\xff\xff\xff\xff");
    let body = raw_body("node.measured", Some("measured"), links);
    assert_eq!(refusal(body), "log_malformed");
}

#[test]
fn measurements_of_members_are_seen_replaced_and_expire() {
    let (home, other) = (Home::new(), Home::joining());
    home.admit(2, Level::Member);
    let say = |seed: u8, memory: u64, now: u64| {
        let body = Body::NodeMeasured(measured(memory));
        home.log.append(&key(seed), body, now).unwrap();
    };
    say(1, 10, NOW);
    say(2, 20, NOW + 1);
    say(1, 30, NOW + 2);
    // A stranger's are stored here, and not shown.
    say(9, 40, NOW + 2);
    sync(&home.log, &other.log, NOW + 2);
    let seen = |log: &EventLog, now: u64| -> Vec<(NodeId, u64)> {
        let state = log.state();
        let all = state.measured(now);
        all.map(|(node, it)| (*node, it.memory_bytes)).collect()
    };
    let mut expected = vec![(id(1), 30), (id(2), 20)];
    expected.sort();
    for log in [&home.log, &other.log] {
        assert_eq!(seen(log, NOW + 2), expected);
        let one_left = seen(log, NOW + 1 + ADVERT_LIFE_MS);
        assert_eq!(one_left, [(id(1), 30)]);
        assert_eq!(seen(log, NOW + 2 + ADVERT_LIFE_MS), vec![]);
    }
    // Measurements without content withdraw the earlier ones.
    let nothing = Body::NodeMeasured(Measured::default());
    home.log.append(&key(2), nothing, NOW + 2).unwrap();
    assert_eq!(seen(&home.log, NOW + 2), [(id(1), 30)]);
    say(2, 20, NOW + 2);
    // An older event does not come back, and a member that left is not shown.
    let old = founder().say(NOW, NOW, Body::NodeMeasured(measured(50)));
    assert_eq!(codes(&home.log, &[old], NOW + 2), ["log_stale"]);
    home.append(2, Body::Left {});
    assert_eq!(seen(&home.log, NOW + 2), [(id(1), 30)]);
    // No event has an effect on the durable state.
    let durable = Event {
        lane: Lane::Durable {
            prev: EventHash::ZERO,
        },
        ..founder().draft(Body::NodeMeasured(measured(1)))
    };
    assert!(durable.sign(&key(1)).is_err());
}

#[test]
fn events_about_models_are_printed_as_text_and_hexadecimal_digits() {
    let home = Home::new();
    home.append(1, adopted(1));
    home.append(1, dropped(1));
    home.append(1, Body::NodeMeasured(measured(5)));
    let mut printed: Vec<Value> = Vec::new();
    let read = |record: Record| {
        printed.push(serde_json::to_value(record).unwrap());
        Ok(true)
    };
    home.log.records(read).unwrap();
    let [_, adopt, dropped, measured] = printed.try_into().unwrap();
    assert_eq!(adopt["kind"], "model.adopt");
    assert_eq!(adopt["status"], "effective");
    assert_eq!(adopt["body"]["weights"], "01".repeat(32));
    let read: Adoption = serde_json::from_value(adopt["body"].clone()).unwrap();
    assert_eq!(read, adoption(1));
    assert_eq!(dropped["kind"], "model.drop");
    assert_eq!(dropped["body"], json!({ "weights": "01".repeat(32) }));
    assert_eq!(measured["kind"], "node.measured");
    let link = &measured["body"]["links"][0];
    assert_eq!(link["node"], id(3).to_string());
    assert_eq!(measured["body"]["models"][0]["weights"], "07".repeat(32));
}
