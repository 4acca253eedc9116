//! `specs/vectors.json`: an example of every message in `specs/`, for the tests of other
//! implementations. `HEARTHNET_WRITE_VECTORS=1 cargo test -p hearthnet-bus vectors` writes it.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use hearthnet_transport::CloseCode;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::calls::{CallError, Envelope, ServerEvent, ServingSession};
use crate::evidence::Evidence;
use crate::invite::Invite;
use crate::log::{
    Adoption, Body, Dispute, Event, EventHash, EventId, Finding, Gave, Heads, Lane, Level,
    LinkSpeed, Measured, ModelSpeed, Policy,
};
use crate::node::weights::{Held, Object, Reply, Request};
use crate::receipt::{Claim, Inputs, SignedClaims, Statement};
use crate::sync::SyncMessage;
use crate::testing::{descriptor, id, key};
use crate::{Capability, CommunityId, Descriptor, Grant};

/// Seeds of the keys: a key's secret is its seed, 32 times.
const NODE: u8 = 1;
const OTHER: u8 = 2;
const INVITE: u8 = 3;
const ROOT: u8 = 9;
/// Time of every message: Unix seconds.
const NOW: u64 = 1_750_000_000;
const NOW_MS: u64 = NOW * 1000;

/// Name of a vector, and its bytes in hexadecimal or its text.
type Vector = (String, String);

/// Digits of the blocks of hexadecimal in a specification, which breaks them into lines.
pub(crate) fn hex_blocks(spec: &str) -> impl Iterator<Item = String> {
    let blocks = spec.split("```hex").skip(1);
    let blocks = blocks.filter_map(|rest| rest.split("```").next());
    blocks.map(|block| block.split_whitespace().collect())
}

/// Vectors of these bytes.
fn hexadecimal<'a, B: AsRef<[u8]>>(named: impl IntoIterator<Item = (&'a str, B)>) -> Vec<Vector> {
    let named = named.into_iter();
    named
        .map(|(name, bytes)| (name.to_owned(), hex::encode(bytes)))
        .collect()
}

fn community() -> CommunityId {
    CommunityId::from(id(ROOT))
}

/// Examples of `specs/x08-tensor-transport.md`, which the transport's tests hold to its codec.
fn frames() -> Vec<Vector> {
    let spec = include_str!("../../specs/x08-tensor-transport.md");
    let blocks = spec.split("```hex ").skip(1).map(|block| {
        let (name, rest) = block.split_once('\n').expect("a name");
        let (digits, _) = rest.split_once("```").expect("an end");
        let digits: String = digits.split_whitespace().collect();
        (name.to_owned(), digits)
    });
    blocks.collect()
}

fn invite() -> Invite {
    let hints = ["192.168.1.20:7600", "[fd00::20]:7600"];
    let hints = hints.map(|hint| hint.parse::<SocketAddr>().expect("an address"));
    Invite::new(community(), [INVITE; 32], 1_800_000_000, hints.into()).expect("an invite")
}

fn bodies() -> Vec<Body> {
    let request = invite().request(id(OTHER), "Ada").expect("a request");
    let policy = Policy {
        who_may_invite: Level::Member,
        research: true,
    };
    vec![
        Body::CommunityCreated {
            name: "Elm Street".into(),
            policy,
            founder: id(NODE),
        },
        Body::PolicyChanged(policy),
        Body::Invited {
            invite: id(INVITE),
            level: Level::Trusted,
            uses: 5,
            expires_ms: 1_800_000_000_000,
        },
        Body::InviteWithdrawn {
            invite: id(INVITE),
            members: Some([id(OTHER)].into()),
        },
        Body::Admitted {
            request,
            level: Level::Trusted,
        },
        Body::LevelChanged {
            node: id(OTHER),
            level: Level::Anchor,
            last_seq: Some(7),
        },
        Body::Revoked {
            node: id(OTHER),
            last_seq: 7,
        },
        Body::Left {},
        Body::Named {
            name: "Grace".into(),
        },
        Body::ModelAdopted(Adoption {
            head: [4; 32],
            name: "smollm2-135m-instruct".into(),
            layers: 30,
            pieces: [5; 32],
            sources: vec!["hf:owner/repository/model.gguf".into()],
            weights: [6; 32],
            file_bytes: 100_000_000,
            head_bytes: 6_000_000,
            manifest_bytes: 30_000,
        }),
        Body::ModelDropped { weights: [6; 32] },
        Body::Disputed(Dispute {
            layers: (2, 5),
            accused: id(NODE),
            weights: [6; 32],
            witness: Some(id(OTHER)),
            evidence: [4; 32],
            receipts: vec![[7; 32], [8; 32]],
            evidence_bytes: 3_000_000,
        }),
        Body::Judged {
            dispute: [5; 32],
            finding: Finding::Accused,
        },
        Body::NodeGave(Gave {
            day: 20_254,
            tokens: 700,
            minutes: 1440,
            weights_bytes: 5_000_000,
        }),
        Body::ShardAdvertised(Box::new(descriptor(id(NODE)))),
        Body::ShardWithdrawn {
            shard_id: "m:0-7".into(),
        },
        Body::NodeSeen {
            endpoints: vec!["192.168.1.20:7600".into()],
            name: "Grace".into(),
            software: "example/1".into(),
        },
        Body::NodeMeasured(Measured {
            links: vec![LinkSpeed {
                node: id(OTHER),
                kbit_s: 900_000,
                delay_us: 300,
            }],
            models: vec![ModelSpeed {
                head_us: 4000,
                step_us: 50,
                weights: [6; 32],
                layer_us: 600,
                prefill_row_us: 90,
            }],
            running_s: 3600,
            memory_bytes: 4 << 30,
            online_permille: 950,
        }),
        Body::GrantRevoked {
            issuer: id(NODE),
            id: *b"0123456789abcdef",
        },
    ]
}

/// The first event of its author with this body.
fn event(body: Body) -> Vec<u8> {
    let author = match body {
        Body::CommunityCreated { .. } => key(ROOT),
        _ => key(NODE),
    };
    let lane = match body.slot() {
        None => Lane::Durable {
            prev: EventHash::ZERO,
        },
        Some(slot) => Lane::Ephemeral {
            slot,
            expires_ms: NOW_MS + 60_000,
        },
    };
    let event = Event {
        community: community(),
        author: author.id(),
        seq: 1,
        lamport: 1,
        time_ms: NOW_MS,
        id: EventId::new(NOW_MS, 0),
        lane,
        body,
    };
    let raw = event.sign(&author).expect("a valid event");
    assert_eq!(Event::verify(&raw).expect("a valid event"), event);
    raw
}

fn events() -> Vec<Vector> {
    let bodies = bodies();
    hexadecimal(bodies.iter().map(|body| (body.kind(), event(body.clone()))))
}

fn joining() -> Vec<Vector> {
    let (invite, name) = (invite(), "Ada");
    let request = invite.request(id(OTHER), name).expect("a request");
    request.verify().expect("a valid proof");
    let code = invite.to_string();
    assert_eq!(code.parse::<Invite>().expect("a code"), invite);
    let params = serde_json::to_string(&request).expect("JSON");
    vec![("invite_code".into(), code), ("join_params".into(), params)]
}

fn grant() -> Vec<u8> {
    let grant = Grant {
        issuer: id(NODE),
        subject: id(NODE),
        audience: id(OTHER),
        scope: Capability::shard_serve(),
        not_before: NOW,
        expires: NOW + 60,
        id: *b"0123456789abcdef",
    };
    grant.sign(&key(NODE)).expect("a grant")
}

/// Messages of `/bus/v1`: those of the caller as written here, and the answers of a session.
fn calls() -> Vec<Vector> {
    let capability = Capability::bus_describe();
    let envelope = Envelope::new(
        id(NODE),
        id(OTHER),
        capability,
        "{}",
        *b"0123456789abcdef",
        NOW_MS,
    );
    let envelope = URL_SAFE_NO_PAD.encode(envelope.sign(&key(NODE)).expect("an envelope"));
    let from_app = r#"{"capability":"bus.describe@1.0","params":{}}"#;
    let from_app = format!(r#"{{"call":1,"seq":1,"event":"call","data":{from_app}}}"#);
    let from_node = format!(r#"{{"envelope":"{envelope}","params":"{{}}"}}"#);
    let from_node = format!(r#"{{"call":2,"seq":1,"event":"call","data":{from_node}}}"#);
    let ack = r#"{"call":1,"seq":2,"event":"ack","data":{"seq":1}}"#;
    let cancel = r#"{"call":1,"seq":3,"event":"cancel","data":{}}"#;

    let mut session = ServingSession::default();
    let opens = |session: &mut ServingSession, text: &str, number: u32| {
        let opened = session.receive(text).expect("a message");
        let is_open = matches!(
            opened,
            ServerEvent::Open { call, request: Ok(_) } if call == number
        );
        assert!(is_open, "{text}");
    };
    opens(&mut session, &from_app, 1);
    session
        .event(1, "progress", &json!({ "done": 1 }))
        .expect("room");
    let progress = session.poll_transmit().expect("an event");
    assert_eq!(session.receive(ack), Ok(ServerEvent::Room { call: 1 }));
    assert_eq!(
        session.receive(cancel),
        Ok(ServerEvent::Cancelled { call: 1 })
    );
    let error = session.poll_transmit().expect("an end");
    opens(&mut session, &from_node, 2);
    session.finish(2, Ok::<_, &CallError>(&json!({ "capabilities": [] })));
    let end = session.poll_transmit().expect("an end");
    let malformed = session.receive("{}").expect_err("a violation");
    assert_eq!(malformed.code, CloseCode::FrameUnknown);
    [
        ("call_of_app", from_app),
        ("call_of_node", from_node),
        ("event", progress),
        ("ack", ack.to_owned()),
        ("cancel", cancel.to_owned()),
        ("error", error),
        ("end", end),
    ]
    .map(|(name, text)| (name.to_owned(), text))
    .into()
}

fn gossip() -> Vec<Vector> {
    let heads = Heads::empty(community()).to_cbor();
    let messages = [
        (
            "hello",
            SyncMessage::Hello {
                version: 1,
                community: *community().as_bytes(),
            },
        ),
        (
            "heads",
            SyncMessage::Heads {
                round: 1,
                heads: heads.into(),
            },
        ),
        (
            "events",
            SyncMessage::Events {
                number: 1,
                events: vec![event(Body::Left {}).into()],
            },
        ),
        (
            "ack",
            SyncMessage::Ack {
                number: 1,
                accepted: 1,
                refused: 0,
            },
        ),
        ("even", SyncMessage::Even { round: 1 }),
    ];
    let encoded = messages.map(|(name, message)| {
        let bytes = message.encode();
        assert_eq!(SyncMessage::decode(&bytes).expect("a message"), message);
        (name, bytes)
    });
    hexadecimal(encoded)
}

fn weights() -> Vec<Vector> {
    let weights = [6; 32];
    let range = Request::Range {
        weights,
        object: Object::Manifest,
        offset: 4096,
        len: 100,
    };
    let held = Held {
        head_bytes: 6_000_000,
        manifest_bytes: 30_000,
        piece_list_bytes: 12_000,
        pieces: vec![0..8, 16..24],
    };
    let data = Reply::Data {
        more: false,
        bytes: Bytes::from_static(&[1, 2, 3]),
    };
    hexadecimal([
        ("held", Request::Held { weights }.encode(1)),
        ("get_piece", Request::Piece { weights, index: 7 }.encode(2)),
        ("get_range", range.encode(3)),
        ("held_reply", Reply::Held(held).encode(1)),
        ("data", data.encode(2)),
        ("none", Reply::None.encode(3)),
    ])
}

/// Claim and statement of the example of `specs/receipts.md`.
fn claimed() -> (Claim, Statement) {
    let mut inputs = Inputs::default();
    assert!(inputs.extend(0, &[1, 2, 3, 4, 5, 6, 7, 8], 4));
    let claim = Claim::new(&inputs, 1, &[9, 10, 11, 12]).expect("a claim");
    let statement = Statement {
        host: id(NODE),
        caller: id(OTHER),
        weights: [6; 32],
        layers: (2, 5),
        arithmetic: "canonical-1".into(),
        stream: 7,
        epoch: 0,
        claims: 1,
        chain: claim.after([0; 32]),
    };
    (claim, statement)
}

/// The example of `specs/disputes.md`.
fn disputes() -> Vec<Vector> {
    let (claim, statement) = claimed();
    let accused = SignedClaims {
        signature: statement.sign(&key(NODE)),
        statement,
        before: [0; 32],
        claims: vec![claim],
    };
    let evidence = Evidence::new(4, vec![1, 2, 3, 4, 5, 6, 7, 8], accused, None);
    let evidence = evidence.expect("evidence");
    let sealed = crate::sealed::tests::example(&evidence.encode(), &[4]);
    let hash: [u8; 32] = Sha256::digest(&sealed).into();
    let dispute = evidence.dispute(hash, sealed.len() as u64);
    let id = dispute.id(&id(OTHER));
    let body = crate::identity::cbor::encode(&dispute).expect("a body");
    hexadecimal([
        ("evidence", evidence.encode()),
        ("sealed", sealed),
        ("hash", hash.to_vec()),
        ("id", id.to_vec()),
        ("body", body),
    ])
}

/// The example of `specs/receipts.md`.
fn receipts() -> Vec<Vector> {
    let (claim, statement) = claimed();
    let signature = statement.sign(&key(NODE));
    hexadecimal([
        ("input", claim.input.to_vec()),
        ("output", claim.output.to_vec()),
        ("chain", statement.chain.to_vec()),
        ("statement", statement.encode()),
        ("signature", signature.to_vec()),
    ])
}

/// The file. It is written by hand, because the order of the members of a `serde_json` object
/// depends on the features of the build.
fn file() -> String {
    let descriptor = descriptor(id(NODE)).to_cbor().expect("a descriptor");
    let signed = hexadecimal([("grant", grant()), ("descriptor", descriptor)]);
    let keys = [
        ("node", NODE),
        ("other", OTHER),
        ("invite", INVITE),
        ("root", ROOT),
    ];
    let keys = hexadecimal(keys.map(|(name, seed)| (name, *id(seed).as_bytes())));
    let sections = [
        ("keys", keys),
        ("frames", frames()),
        ("session", signed),
        ("events", events()),
        ("joining", joining()),
        ("calls", calls()),
        ("gossip", gossip()),
        ("weights", weights()),
        ("receipts", receipts()),
        ("disputes", disputes()),
    ];
    let quoted = |text: &str| serde_json::to_string(text).expect("JSON");
    let sections = sections.map(|(name, vectors): (&str, Vec<Vector>)| {
        let lines: Vec<String> = vectors
            .iter()
            .map(|(name, value)| format!("    {}: {}", quoted(name), quoted(value)))
            .collect();
        format!("  {}: {{\n{}\n  }}", quoted(name), lines.join(",\n"))
    });
    format!("{{\n{}\n}}\n", sections.join(",\n"))
}

#[test]
fn the_file_of_test_vectors_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../specs/vectors.json");
    let file = file();
    if std::env::var_os("HEARTHNET_WRITE_VECTORS").is_some() {
        std::fs::write(&path, &file).expect("the file is written");
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = stored
        .lines()
        .zip(file.lines())
        .find(|(stored, made)| stored != made);
    assert!(
        stored == file,
        "specs/vectors.json differs from the codecs, first at {differs:?}; if that is meant, run \
         HEARTHNET_WRITE_VECTORS=1 cargo test -p hearthnet-bus vectors"
    );
}

#[test]
fn every_kind_of_event_has_a_test_vector() {
    let spec = include_str!("../../specs/event-log.md");
    let (_, kinds) = spec.split_once("| kind | lane | body |").expect("a table");
    let rows = kinds
        .lines()
        .skip(2)
        .take_while(|row| row.starts_with("| `"));
    let specified: BTreeSet<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
    let bodies = bodies();
    let made: BTreeSet<&str> = bodies.iter().map(Body::kind).collect();
    assert_eq!(made, specified);
}

#[test]
fn the_descriptor_of_the_tensor_transport_is_one() {
    let frames = frames();
    let (_, digits) = frames
        .iter()
        .find(|(name, _)| name == "descriptor")
        .expect("an example of DESCRIPTOR");
    let frame = hex::decode(digits).expect("hexadecimal digits");
    let body = frame.get(16..).expect("a body");
    let decoded = Descriptor::from_cbor(body).expect("a descriptor");
    decoded.validate().expect("a valid descriptor");
    assert_eq!(decoded, descriptor(id(NODE)));
    assert_eq!(decoded.to_cbor().expect("bytes"), body);
}
