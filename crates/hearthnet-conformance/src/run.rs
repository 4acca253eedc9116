//! Carries out the checks: reaches the state of each attempt, and follows its script.

use std::time::Duration;

use serde::Serialize;
use tokio::time::timeout;

use crate::limits::Limits;
use crate::list;
use crate::raw::violations::Reached;
use crate::raw::{
    Arrived, Credentials, Ending, Failed, Frame, Hello, Peer, SWITCHING, cbor, kind, stream_open,
};
use crate::script::{Act, At, Attempt, Check, Expect, Host, POSITIONS, TIMEOUT, Token};

/// Time for a host to end a session that a check has ended.
const FAREWELL: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// Result of a check. Its texts may hold names that the host sent.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Outcome {
    pub name: &'static str,
    /// Specification and section.
    pub section: &'static str,
    pub verdict: Verdict,
    /// Attempts, up to the first that failed.
    pub done: Vec<String>,
    /// Expected in the last attempt.
    pub expected: String,
    /// Observed in the last attempt; for a skipped check, why it was skipped.
    pub observed: String,
}

/// Difference between the specification and the host.
struct Mismatch {
    expected: String,
    observed: String,
}

/// Carries out all checks on a host, those of its deadlines beside the others. They last for a
/// minute with the default deadlines; without `idle` they are left out.
///
/// If no session opens at all, the outcome is that of the check `session` alone.
pub async fn run(host: &Host, idle: bool) -> Vec<Outcome> {
    let limits = match limits(host).await {
        Ok(limits) => limits,
        Err(observed) => {
            return vec![Outcome {
                name: "session",
                section: "x08-tensor-transport.md 3",
                verdict: Verdict::Failed,
                done: vec!["HELLO with a valid token".to_owned()],
                expected: "HELLO".to_owned(),
                observed,
            }];
        }
    };
    let others = async {
        let mut outcomes = Vec::new();
        for check in list::checks(host, &limits) {
            outcomes.push(carry_out(host, check).await);
        }
        outcomes
    };
    if !idle {
        return others.await;
    }
    let (hello, silence) = (list::silence_before_hello(), list::silence());
    let (mut outcomes, hello, silence) =
        tokio::join!(others, carry_out(host, hello), carry_out(host, silence));
    outcomes.extend([hello, silence]);
    outcomes
}

/// Limits in the host's HELLO.
async fn limits(host: &Host) -> Result<Limits, String> {
    let mut peer = upgraded(host).await.map_err(|Failed(why)| why)?;
    peer.send(hello(host, "pipeline", Token::Valid)?.frame())
        .await;
    let answer = next(&mut peer, kind::HELLO, TIMEOUT).await?;
    if !answer.is(kind::HELLO) {
        return Err(describe(&mut peer, answer).await);
    }
    leave(peer).await;
    Ok(Limits::of(&answer))
}

async fn carry_out(host: &Host, check: Check) -> Outcome {
    let Check {
        name,
        section,
        patience,
        attempts,
        without,
    } = check;
    let mut outcome = Outcome {
        name,
        section,
        verdict: Verdict::Skipped,
        done: Vec::new(),
        expected: String::new(),
        observed: without.to_owned(),
    };
    for Attempt { what, at, script } in attempts {
        outcome.done.push(what);
        match follow(host, &at, script, patience).await {
            Ok(expected) => {
                outcome.verdict = Verdict::Passed;
                outcome.observed.clone_from(&expected);
                outcome.expected = expected;
            }
            Err(Mismatch { expected, observed }) => {
                outcome.verdict = Verdict::Failed;
                outcome.expected = expected;
                outcome.observed = observed;
                break;
            }
        }
    }
    outcome
}

/// Follows a script; returns what was expected last.
async fn follow(
    host: &Host,
    at: &At,
    script: Vec<Act>,
    patience: Duration,
) -> Result<String, Mismatch> {
    let reached = timeout(patience, reach(host, at)).await;
    let observed = match reached {
        Ok(Ok(Some(peer))) => return follow_on(peer, at, script, patience).await,
        Ok(Ok(None)) => {
            return Ok(match at {
                At::Path(path) => format!("nothing: {path} is not served"),
                _ => at.to_string(),
            });
        }
        Ok(Err(Failed(why))) => why,
        Err(_) => nothing(patience),
    };
    Err(Mismatch {
        expected: at.to_string(),
        observed,
    })
}

async fn follow_on(
    mut peer: Peer,
    at: &At,
    script: Vec<Act>,
    patience: Duration,
) -> Result<String, Mismatch> {
    let (mut last, mut ended) = (at.to_string(), false);
    for act in script {
        match act {
            Act::Send(what) => peer.send(what).await,
            Act::Expect(expect) => {
                last = expect.to_string();
                ended |= expect.ends();
                if let Err(observed) = meet(&mut peer, &expect, patience).await {
                    return Err(Mismatch {
                        expected: last,
                        observed,
                    });
                }
            }
        }
    }
    if !ended {
        leave(peer).await;
    }
    Ok(last)
}

/// Brings a connection to a state. `None`: the state is all that the attempt is about.
async fn reach(host: &Host, at: &At) -> Result<Option<Peer>, Failed> {
    let peer = match at {
        At::Refused { unknown_key } => {
            let credentials = match unknown_key {
                true => host.unknown.clone(),
                false => Credentials::none(),
            };
            // The host may refuse in the handshake or, as far as this side sees, right after it.
            let Ok(mut peer) = Peer::secured(host.addr, &credentials).await else {
                return Ok(None);
            };
            let answer = peer.upgrade().await?;
            return match answer.starts_with(SWITCHING) {
                true => Err(Failed(answer)),
                false => Ok(None),
            };
        }
        At::NotFound(path) => {
            let mut peer = Peer::secured(host.addr, &host.admitted).await?;
            let answer = peer.upgrade_at(path).await?;
            return match answer.starts_with("HTTP/1.1 404") {
                true => Ok(None),
                false => Err(first_line(&answer)),
            };
        }
        At::Path(path) => {
            let mut peer = Peer::secured(host.addr, &host.admitted).await?;
            let answer = peer.upgrade_at(path).await?;
            match answer {
                answer if answer.starts_with(SWITCHING) => peer,
                answer if answer.starts_with("HTTP/1.1 404") => return Ok(None),
                answer => return Err(first_line(&answer)),
            }
        }
        At::Reached(Reached::Upgrade) => upgraded(host).await?,
        At::Reached(Reached::Hello(change)) => {
            let mut peer = upgraded(host).await?;
            let hello = hello(host, "pipeline", Token::Valid).map_err(Failed)?;
            peer.send(change(hello)).await;
            peer
        }
        At::Reached(Reached::Session(change)) => {
            let hello = hello(host, "pipeline", Token::Valid).map_err(Failed)?;
            upgraded(host).await?.greeted(&change(hello)).await?
        }
        At::Reached(Reached::Stream) => {
            let hello = hello(host, "pipeline", Token::Valid).map_err(Failed)?;
            let mut peer = upgraded(host).await?.greeted(&hello).await?;
            let (weights, layers) = (&host.shard.weights, host.shard.layers);
            peer.send(stream_open(1, weights, layers, POSITIONS)).await;
            let answer = next(&mut peer, kind::STREAM_OPENED, TIMEOUT).await;
            let answer = answer.map_err(Failed)?;
            if !answer.is(kind::STREAM_OPENED) {
                return Err(Failed(describe(&mut peer, answer).await));
            }
            peer
        }
        At::Token(token) => {
            let mut peer = upgraded(host).await?;
            let hello = hello(host, "pipeline", *token).map_err(Failed)?;
            peer.send(hello.frame()).await;
            peer
        }
        At::TokenAgain => {
            let hello = hello(host, "pipeline", Token::Valid).map_err(Failed)?;
            leave(upgraded(host).await?.greeted(&hello).await?).await;
            let mut peer = upgraded(host).await?;
            peer.send(hello.frame()).await;
            peer
        }
        At::Bench => {
            let hello = hello(host, "bench", Token::Valid).map_err(Failed)?;
            upgraded(host).await?.greeted(&hello).await?
        }
    };
    Ok(Some(peer))
}

async fn upgraded(host: &Host) -> Result<Peer, Failed> {
    Peer::upgraded(host.addr, &host.admitted).await
}

fn hello(host: &Host, purpose: &str, token: Token) -> Result<Hello, String> {
    let token = (host.token)(token)?;
    Ok(Hello::new(purpose, token).with("agent", "hearthnet-conformance/1"))
}

fn first_line(answer: &str) -> Failed {
    let line = answer.lines().next().unwrap_or_default();
    Failed(match line.is_empty() {
        true => "the connection ended".to_owned(),
        false => line.to_owned(),
    })
}

fn nothing(patience: Duration) -> String {
    format!("nothing in {} s", patience.as_secs())
}

/// Next input. PINGs of the host are passed over, unless one is `wanted`.
async fn next(peer: &mut Peer, wanted: u8, patience: Duration) -> Result<Arrived, String> {
    let input = async {
        loop {
            let arrived = peer.receive().await;
            if wanted == kind::PING || !arrived.is(kind::PING) {
                return arrived;
            }
        }
    };
    timeout(patience, input)
        .await
        .map_err(|_| nothing(patience))
}

async fn meet(peer: &mut Peer, expect: &Expect, patience: Duration) -> Result<(), String> {
    let wanted = match expect {
        Expect::End(code) => {
            let ending = ending(peer, patience).await?;
            return match ending.is(*code) {
                true => Ok(()),
                false => Err(ending.to_string()),
            };
        }
        Expect::Close(code) => {
            let ending = ending(peer, patience).await?;
            return match ending.close == Some(code.number()) {
                true => Ok(()),
                false => Err(ending.to_string()),
            };
        }
        Expect::Frame(wanted, ..) => *wanted,
        Expect::Fault(_) => kind::STREAM_ERROR,
    };
    let arrived = next(peer, wanted, patience).await?;
    if !arrived.is(wanted) {
        return Err(describe(peer, arrived).await);
    }
    match (&arrived, expect) {
        (Arrived::Frame { body, .. }, Expect::Frame(_, _, test)) => test(body),
        (_, Expect::Fault(codes)) => match arrived.text("code") {
            Some(code) if codes.contains(&code.as_str()) => Ok(()),
            _ => Err(name(&arrived)),
        },
        _ => Ok(()),
    }
}

async fn ending(peer: &mut Peer, patience: Duration) -> Result<Ending, String> {
    let ending = timeout(patience, peer.ending()).await;
    ending.map_err(|_| format!("no end of the connection in {} s", patience.as_secs()))
}

/// Name of an input that was not expected. If it is the beginning of an end, the end.
async fn describe(peer: &mut Peer, arrived: Arrived) -> String {
    match &arrived {
        Arrived::Frame { kind, .. } if *kind != kind::BYE => name(&arrived),
        _ => match timeout(FAREWELL, peer.ending_after(arrived)).await {
            Ok(ending) => ending.to_string(),
            Err(_) => "BYE without a close frame".to_owned(),
        },
    }
}

fn name(arrived: &Arrived) -> String {
    match arrived {
        Arrived::Frame { kind, .. } if *kind == kind::STREAM_ERROR => {
            let code = arrived.text("code").unwrap_or_default();
            format!("STREAM_ERROR {code}")
        }
        Arrived::Frame { kind, .. } => format!("a frame of type {kind:#04x}"),
        Arrived::Close(_) | Arrived::End => "the connection ended".to_owned(),
        Arrived::Nothing => "nothing".to_owned(),
    }
}

/// Ends a session, so that the host frees its place before the next attempt.
async fn leave(mut peer: Peer) {
    peer.send(Frame::new(kind::BYE, cbor(&[("code", "normal".into())])))
        .await;
    // A host that does not answer fails the check `bye`.
    let _ = timeout(FAREWELL, peer.ending()).await;
}
