//! `hearthnet conformance`: checks that a host keeps the protocol. The checks are those of
//! `hearthnet-conformance`; this file connects with the node's key, makes tokens, and prints.

use std::net::SocketAddr;
use std::sync::Arc;

use hearthnet_bus::receipt::{Claim, Inputs, Statement};
use hearthnet_bus::{Descriptor, Grant, NodeId, NodeKey, now_ms};
use hearthnet_conformance::raw::Credentials;
use hearthnet_conformance::{Host, Outcome, ReceiptTest, Shard, SignedStep, Token, Verdict};
use hearthnet_engine::ARITHMETIC;
use hearthnet_orchestrator::link::HostAddr;
use hearthnet_transport::{Config, Connection, DType, Hello, Identity, Message, connect};
use serde_json::json;
use tokio::time::timeout;

use crate::cli::args::ConformanceArgs;
use crate::cli::{Failure, Kind, block_on, counted, failure, note, print, print_json, table};
use crate::config::Context;

/// Validity of a session token in seconds: it is used at once.
const TOKEN_SECONDS: u64 = 60;
/// Age of an expired token in seconds, more than twice the largest tolerated difference of clocks.
const EXPIRED_SECONDS: u64 = 3600;

pub(crate) fn run(args: &ConformanceArgs, cx: &Context) -> Result<(), Failure> {
    block_on(check(args, cx))
}

async fn check(args: &ConformanceArgs, cx: &Context) -> Result<(), Failure> {
    let key = cx.global.node_key()?;
    let (addr, descriptor) = reach(&args.host, &key, cx.config.transport()).await?;
    let shard = shard(&descriptor, args.width)?;
    let receipt = receipt_test(&descriptor, &shard, key.id());
    if !args.quick && !args.json {
        note("this takes a minute: idle connections are checked too (--quick leaves them out)");
    }
    let unknown = NodeKey::generate().map_err(Failure::internal)?;
    let node = args.host.node;
    let host = Host {
        addr,
        admitted: credentials(&key)?,
        unknown: credentials(&unknown)?,
        token: Box::new(move |wanted| token(wanted, &key, &unknown, node)),
        shard,
        receipt,
        descriptor: Arc::new(move |body: &[u8]| {
            let descriptor = Descriptor::from_cbor(body).map_err(|e| e.to_string())?;
            match descriptor.host == node {
                true => Ok(()),
                false => Err("the descriptor of another key".to_owned()),
            }
        }),
    };
    report(&hearthnet_conformance::run(&host, !args.quick).await, args)
}

/// Opens a session as orchestrators do, so that both sides prove their keys. Returns the address
/// that answered and the host's descriptor.
async fn reach(
    host: &HostAddr,
    key: &NodeKey,
    config: Config,
) -> Result<(SocketAddr, Descriptor), Failure> {
    let unavailable = |why: String| {
        failure!(ShardUnavailable, "no session with {host}: {why}").hint(
            "the host must run outside of any community and admit this node: on our hosts, `shard \
             serve --peer-key` with the id that `hearthnet id` prints here",
        )
    };
    let found = tokio::net::lookup_host(&host.endpoint).await;
    let addr = found.map_err(|e| unavailable(e.to_string()))?.next();
    let addr = addr.ok_or_else(|| unavailable("the name has no address".to_owned()))?;
    let identity = Identity::from_secret(&key.secret()).map_err(Failure::internal)?;
    let patience = config.deadlines.connect * 2;
    let hello = Hello::new("pipeline", session_token(key, key.id(), host.node, 0)?);
    let connection = connect(&addr.to_string(), &identity, host.node, hello, config).await;
    let mut connection = connection.map_err(|error| {
        let code = error.code().map(|code| format!("{code}: "));
        unavailable(format!("{}{error}", code.unwrap_or_default()))
    })?;
    let described = timeout(patience, describe(&mut connection)).await;
    let late = |_| "it did not describe itself in time".to_owned();
    let descriptor = described.map_err(late).flatten().map_err(unavailable)?;
    Ok((addr, descriptor))
}

/// Descriptor of the host of an open session.
async fn describe(connection: &mut Connection) -> Result<Descriptor, String> {
    let sent = connection.sender().send(Message::Describe).await;
    sent.map_err(|e| e.to_string())?;
    loop {
        let message = connection.recv().await.map_err(|e| e.to_string())?;
        if let Message::Descriptor(bytes) = message {
            return Descriptor::from_cbor(&bytes).map_err(|e| format!("{}: {e}", e.code()));
        }
    }
}

/// Layers in a descriptor.
fn shard(descriptor: &Descriptor, width: Option<u32>) -> Result<Shard, Failure> {
    let unknown = |what: &str| failure!(BadRequest, "the host's descriptor has {what}");
    let dtype = DType::of_rows(&descriptor.boundary_dtype)
        .ok_or_else(|| unknown("a boundary dtype that this version does not know"))?;
    let mut weights = [0; 32];
    hex::decode_to_slice(&descriptor.weights_sha256, &mut weights)
        .map_err(|_| unknown("no weights id"))?;
    Ok(Shard {
        weights,
        layers: descriptor.layer_range,
        total_layers: descriptor.total_layers,
        width: width.or(descriptor.width()),
        dtype: (dtype as u8, dtype.size()),
        exact: descriptor.arithmetic == ARITHMETIC,
    })
}

/// Compares a receipt with the rows of its step.
fn receipt_test(descriptor: &Descriptor, shard: &Shard, caller: NodeId) -> ReceiptTest {
    let statement = Statement {
        host: descriptor.host,
        caller,
        weights: shard.weights,
        layers: shard.layers,
        arithmetic: descriptor.arithmetic.clone(),
        stream: 1,
        epoch: 1,
        claims: 1,
        chain: [0; 32],
    };
    Arc::new(move |step: &SignedStep| {
        let mut inputs = Inputs::default();
        inputs.extend(0, &step.sent, step.sent.len());
        let claim = Claim::new(&inputs, 1, &step.returned);
        let statement = Statement {
            chain: claim.map_or([0; 32], |claim| claim.after([0; 32])),
            ..statement.clone()
        };
        if step.claims != 1 || step.chain != statement.chain {
            return Err("RECEIPT for other rows, or another number of claims".to_owned());
        }
        let verified = statement.verify(&step.signature);
        verified.map_err(|_| "RECEIPT with a signature that is not valid".to_owned())
    })
}

fn credentials(key: &NodeKey) -> Result<Credentials, Failure> {
    let secret = key.secret();
    let identity = Identity::from_secret(&secret).map_err(Failure::internal)?;
    Ok(Credentials::forged(identity.certificate(), &secret))
}

/// Token that `key` signs for itself, as callers of hosts outside of a community do. `age`: seconds
/// since it was signed.
fn session_token(
    key: &NodeKey,
    subject: NodeId,
    host: NodeId,
    age: u64,
) -> Result<Vec<u8>, Failure> {
    let mut grant = Grant::of_session(key.id(), subject, host, TOKEN_SECONDS)
        .map_err(|e| Failure::internal(format!("no random bytes for a token: {e}")))?;
    grant.not_before = (now_ms() / 1000).saturating_sub(age);
    grant.expires = grant.not_before + TOKEN_SECONDS;
    grant.sign(key).map_err(Failure::internal)
}

fn token(wanted: Token, key: &NodeKey, unknown: &NodeKey, host: NodeId) -> Result<Vec<u8>, String> {
    let signed = |subject, audience, age| {
        let token = session_token(key, subject, audience, age);
        token.map_err(|failure| failure.to_string())
    };
    match wanted {
        Token::Valid => signed(key.id(), host, 0),
        Token::Empty => Ok(Vec::new()),
        Token::OtherSubject => signed(unknown.id(), host, 0),
        Token::OtherAudience => signed(key.id(), unknown.id(), 0),
        Token::Expired => signed(key.id(), host, EXPIRED_SECONDS),
        Token::Altered => {
            let mut token = signed(key.id(), host, 0)?;
            // In the first half of the signature.
            let at = token.len().saturating_sub(40);
            if let Some(byte) = token.get_mut(at) {
                *byte ^= 1;
            }
            Ok(token)
        }
        _ => Err("this version cannot make such a token".to_owned()),
    }
}

/// Prints the outcomes.
///
/// # Errors
/// If a check failed, with the names of all that did.
fn report(outcomes: &[Outcome], args: &ConformanceArgs) -> Result<(), Failure> {
    let of = |verdict: Verdict| outcomes.iter().filter(move |o| o.verdict == verdict);
    let failed: Vec<&str> = of(Verdict::Failed).map(|outcome| outcome.name).collect();
    let found = json!({ "host": args.host.to_string(), "checks": outcomes });
    if !args.json {
        print(text(outcomes))?;
        print(format!(
            "{} passed, {} failed, {} skipped\n",
            of(Verdict::Passed).count(),
            failed.len(),
            of(Verdict::Skipped).count()
        ))?;
    }
    if failed.is_empty() {
        return match args.json {
            true => print_json(&found),
            false => Ok(()),
        };
    }
    let names = failed.join(", ");
    let failure = Failure::new(
        Kind::Internal,
        format!("the host does not keep the protocol: {names}"),
    );
    Err(failure
        .code("not_conforming")
        .hint("the table names the section of specs/ that each failed check is about")
        .beside(found))
}

/// Table of all checks, and the attempt at which each failed one failed.
fn text(outcomes: &[Outcome]) -> String {
    let rows = outcomes.iter().map(|outcome| {
        let attempts = match outcome.done.len() {
            0 => String::new(),
            n => counted(n, "attempt"),
        };
        [
            outcome.verdict.to_string(),
            outcome.name.to_owned(),
            outcome.section.to_owned(),
            attempts,
        ]
    });
    let mut text = table("result|check|specification|done", rows);
    for outcome in outcomes {
        let Outcome {
            name,
            expected,
            observed,
            ..
        } = outcome;
        match (outcome.verdict, outcome.done.last()) {
            (Verdict::Failed, Some(what)) => {
                text +=
                    &format!("\n{name}: {what}\n  expected  {expected}\n  observed  {observed}\n");
            }
            (Verdict::Skipped, _) => text += &format!("\n{name}: skipped: {observed}\n"),
            _ => {}
        }
    }
    text + "\n"
}
