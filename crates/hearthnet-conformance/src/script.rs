//! Checks as data: attempts, each of which brings a connection to a state and follows a script.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hearthnet_transport::CloseCode;

use crate::raw::violations::Reached;
use crate::raw::{Credentials, Frame, Outgoing, kind};

/// Positions of a stream on which checks run steps, and most steps that a check sends at once.
pub(crate) const POSITIONS: u32 = 64;

/// Time for an answer: the longest deadline of an opening session, and a slow host's work.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Test of a frame's body. The error says what is wrong with it.
pub type Test = Arc<dyn Fn(&[u8]) -> Result<(), String> + Send + Sync>;

/// Step of one row in stream 1 and epoch 1, and the receipt of it.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names are those of the receipt")]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct SignedStep {
    /// Row of the step, and returned row.
    pub sent: Vec<u8>,
    pub returned: Vec<u8>,
    pub claims: u32,
    pub chain: [u8; 32],
    pub signature: [u8; 64],
}

/// Test of a receipt. The error says what is wrong with it.
pub type ReceiptTest = Arc<dyn Fn(&SignedStep) -> Result<(), String> + Send + Sync>;

/// Maker of session tokens.
pub type MakeToken = Box<dyn Fn(Token) -> Result<Vec<u8>, String> + Send + Sync>;

/// Session token of `specs/session-grant.md`, for the host under check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Token {
    /// Valid and unused.
    Valid,
    /// No bytes.
    Empty,
    /// For another subject than the connecting node.
    OtherSubject,
    /// For another audience than the host.
    OtherAudience,
    /// Expired by more than any tolerated difference of the clocks.
    Expired,
    /// Valid except for one bit of its signature.
    Altered,
}

/// Layers that the host serves, by its descriptor.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the descriptor")]
pub struct Shard {
    pub weights: [u8; 32],
    pub layers: (u32, u32),
    pub total_layers: u32,
    /// Values per row, if they are known.
    pub width: Option<u32>,
    /// Element type of rows on the wire, and bytes of a value.
    pub dtype: (u8, usize),
    /// True for `canonical-1`.
    pub exact: bool,
}

/// Host under check, and the means to reach it.
pub struct Host {
    pub addr: SocketAddr,
    /// Credentials that the host admits.
    pub admitted: Credentials,
    /// Credentials of a key that no host knows.
    pub unknown: Credentials,
    pub token: MakeToken,
    pub shard: Shard,
    /// Test of the descriptor in DESCRIPTOR.
    pub descriptor: Test,
    pub receipt: ReceiptTest,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("addr", &self.addr)
            .field("shard", &self.shard)
            .finish_non_exhaustive()
    }
}

/// Named check. It passes if all its attempts do.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    /// Specification and section.
    pub(crate) section: &'static str,
    /// How long the host may take for each expected answer.
    pub(crate) patience: Duration,
    /// If there are none, the check is skipped for the reason `without`.
    pub(crate) attempts: Vec<Attempt>,
    pub(crate) without: &'static str,
}

/// Attempt of a check, on a connection of its own.
pub(crate) struct Attempt {
    /// Description for people.
    pub(crate) what: String,
    pub(crate) at: At,
    pub(crate) script: Vec<Act>,
}

/// State that a connection reaches before the script begins.
pub(crate) enum At {
    /// TLS with a key that the host does not admit, or with no certificate. The host must open no
    /// WebSocket.
    Refused { unknown_key: bool },
    /// An upgrade at this path must be answered with 404.
    NotFound(&'static str),
    /// WebSocket at a path that the host may serve. If it does not, the script is left out.
    Path(&'static str),
    /// As the violations of the wire say.
    Reached(Reached),
    /// A HELLO with this token was sent.
    Token(Token),
    /// A HELLO was sent whose token has opened a session before.
    TokenAgain,
    /// The session is open, for the purpose `bench`.
    Bench,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Refused { .. } => write!(f, "no WebSocket"),
            At::NotFound(path) => write!(f, "status 404 for {path}"),
            At::Path(path) => write!(f, "a WebSocket at {path}"),
            At::Reached(Reached::Upgrade | Reached::Hello(_)) | At::Token(_) => {
                write!(f, "a WebSocket at /tensor/v1")
            }
            At::Reached(Reached::Session(_)) | At::TokenAgain | At::Bench => {
                write!(f, "an open session")
            }
            At::Reached(Reached::Stream) => write!(f, "STREAM_OPENED"),
        }
    }
}

pub(crate) enum Act {
    Send(Outgoing),
    Expect(Expect),
}

/// Expected input from the host. Its PINGs are passed over, unless one is expected.
#[derive(Clone)]
pub(crate) enum Expect {
    /// The session ends with this code, in BYE and in the close frame.
    End(CloseCode),
    /// The WebSocket ends with a close frame of this code.
    Close(CloseCode),
    /// Frame of this type, whose body passes the test.
    Frame(u8, &'static str, Test),
    /// STREAM_ERROR with one of these codes.
    Fault(&'static [&'static str]),
}

impl Expect {
    /// Whether the connection has ended afterwards.
    pub(crate) fn ends(&self) -> bool {
        matches!(self, Expect::End(_) | Expect::Close(_))
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expect::End(code) => write!(f, "BYE and close frame {} {code}", code.number()),
            Expect::Close(code) => write!(f, "close frame {} {code}", code.number()),
            Expect::Frame(_, name, _) => f.write_str(name),
            Expect::Fault(codes) => write!(f, "STREAM_ERROR {}", codes.join(" or ")),
        }
    }
}

pub(crate) fn check(name: &'static str, section: &'static str, attempts: Vec<Attempt>) -> Check {
    Check {
        name,
        section,
        patience: TIMEOUT,
        attempts,
        without: "",
    }
}

pub(crate) fn attempt(what: impl Into<String>, at: At, script: Vec<Act>) -> Attempt {
    Attempt {
        what: what.into(),
        at,
        script,
    }
}

pub(crate) fn send(what: impl Into<Outgoing>) -> Act {
    Act::Send(what.into())
}

pub(crate) fn end(code: CloseCode) -> Act {
    Act::Expect(Expect::End(code))
}

pub(crate) fn fault(codes: &'static [&'static str]) -> Act {
    Act::Expect(Expect::Fault(codes))
}

pub(crate) fn frame(kind: u8, name: &'static str, test: Test) -> Act {
    Act::Expect(Expect::Frame(kind, name, test))
}

pub(crate) fn any_body() -> Test {
    Arc::new(|_: &[u8]| Ok(()))
}

/// Expects a frame of this body.
pub(crate) fn exactly(kind: u8, name: &'static str, expected: Vec<u8>) -> Act {
    let test: Test = Arc::new(move |body: &[u8]| match body == expected {
        true => Ok(()),
        false => Err(format!("{name} with another body")),
    });
    frame(kind, name, test)
}

pub(crate) fn session() -> At {
    At::Reached(Reached::Session(|hello| hello))
}

pub(crate) fn stream() -> At {
    At::Reached(Reached::Stream)
}

/// PING and its PONG: the session goes on.
pub(crate) fn goes_on() -> [Act; 2] {
    [
        send(Frame::ping()),
        exactly(kind::PONG, "PONG of the same bytes", vec![0; 8]),
    ]
}
