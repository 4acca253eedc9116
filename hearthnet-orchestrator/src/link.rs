//! A session with one host, shared by every chat that uses it.
//!
//! The transport's task that reads the session hands each message to the chat that
//! owns the stream; chats send through the session's own sender. A chat waits on
//! one queue for all its hosts, so that whichever answers first is served first.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_bus::flight::{self, Event, SessionId};
use hearthnet_bus::{Capability, Descriptor, Grant, NodeId, NodeKey, now_ms};
use hearthnet_text::tame;
use hearthnet_transport::{
    CloseCode, Closer, Code, Config, Connection, Handler, Hello, Identity, Message, Sender,
    SessionClosed, StepResult, StreamClose,
};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::error::ChatError;

/// A host as a person writes it: `ADDR:PORT#ed25519:KEY`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostAddr {
    /// `ADDR:PORT` or `NAME:PORT`.
    pub endpoint: String,
    /// Who must answer there.
    pub node: NodeId,
}

impl std::str::FromStr for HostAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((endpoint, node)) = text.split_once('#') else {
            return Err(format!(
                "{text:?} has no node id: write ADDR:PORT#ed25519:KEY as `shard serve` prints it"
            ));
        };
        if endpoint
            .rsplit_once(':')
            .is_none_or(|(host, port)| host.is_empty() || port.parse::<u16>().is_err())
        {
            return Err(format!("{endpoint:?} is not ADDR:PORT"));
        }
        let node = node
            .parse()
            .map_err(|e| format!("{node:?} is not a node id: {e}"))?;
        Ok(Self {
            endpoint: endpoint.to_owned(),
            node,
        })
    }
}

impl std::fmt::Display for HostAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}#{}", self.endpoint, self.node)
    }
}

/// What arrives for a chat. The number is the chat's name for the stream.
#[derive(Debug)]
pub(crate) enum Inbound {
    /// The host opened the stream.
    Opened,
    /// A step's answer.
    Result {
        /// The rows.
        result: StepResult,
        /// When it came.
        at: Instant,
    },
    /// The host ended the stream.
    Error {
        /// The cause.
        code: Code,
        /// The host's words.
        message: String,
    },
    /// The host is about to leave; the stream goes on for a while.
    Leaving,
    /// The host is about to leave, and the stream, on which nothing was asked, has been closed.
    Closed,
    /// The session is gone.
    Lost(Ended),
}

/// How a session ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    /// Why, in words.
    pub(crate) why: String,
    /// What that says of the host.
    pub(crate) cause: EndCause,
}

/// What the end of a session says of its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndCause {
    /// The connection is gone, or one side went away.
    Lost,
    /// The host broke the protocol, in the way that the code names.
    Broken(Code),
    /// This node ended it with this code, because the host's right has ended.
    Barred(Code),
    /// The host ended it with this code, because this node's right has ended.
    Refused(Code),
}

impl Ended {
    pub(crate) fn of(closed: &SessionClosed) -> Self {
        let code = closed.code.into();
        let cause = match (closed.code, closed.by_us) {
            (CloseCode::Revoked | CloseCode::Unauthorized, true) => EndCause::Barred(code),
            (CloseCode::Revoked | CloseCode::Unauthorized, false) => EndCause::Refused(code),
            (broken, true) if broken.is_violation() => EndCause::Broken(code),
            _ => EndCause::Lost,
        };
        Self {
            why: tame(&closed.to_string()).into_owned(),
            cause,
        }
    }
}

/// A chat's queue.
pub(crate) type Inbox = mpsc::UnboundedSender<(u64, Inbound)>;

/// Where the messages of a stream go.
#[derive(Debug)]
struct Route {
    /// The chat's name for the stream, and its queue.
    hop: u64,
    inbox: Inbox,
    epoch: u32,
    /// Nothing is asked of the stream: it does not hold its host back.
    resting: bool,
}

#[derive(Debug, Default)]
struct Routes {
    by_stream: HashMap<u32, Route>,
    /// Last stream number that a chat was given, from 1; 0: none.
    last: u32,
    /// Whether the host is about to leave.
    leaving: bool,
    /// Why the session ended, once it has.
    ended: Option<Ended>,
}

type Streams = Arc<Mutex<Routes>>;

/// An authenticated session with one host.
#[derive(Debug)]
pub struct HostLink {
    /// Where and who the host is.
    pub(crate) addr: HostAddr,
    /// What the host said about itself when the session began.
    pub(crate) descriptor: Descriptor,
    /// The session's name in the flight records of both sides.
    pub(crate) session: SessionId,
    pub(crate) sender: Sender,
    streams: Streams,
    /// Closed with this.
    connection: Connection,
    /// When a successor should be opened.
    stale_at: Instant,
}

/// A host that was heard within this time is there.
const JUST_NOW: Duration = Duration::from_millis(300);

/// How long a host may take to describe itself after the session stands.
const DESCRIBE_DEADLINE: Duration = Duration::from_secs(10);

/// What a session for running rows through layers says it is for.
pub(crate) const PIPELINE: &str = "pipeline";

/// How long a session grant that this node signs for itself holds, in seconds: it is used at once.
const GRANT_SECONDS: u64 = 60;

/// A token for one session with a host, signed by this node for itself: a host that serves
/// outside of a community lets the nodes that it admits grant themselves what it serves.
fn session_token(key: &NodeKey, host: NodeId) -> Result<Vec<u8>, ChatError> {
    let fail = |why: String| ChatError::Engine(format!("cannot sign a session token: {why}"));
    let now = Duration::from_millis(now_ms());
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| fail(e.to_string()))?;
    let grant = Grant {
        issuer: key.id(),
        subject: key.id(),
        audience: host,
        scope: Capability::shard_serve(),
        not_before: now.as_secs(),
        expires: now.as_secs() + GRANT_SECONDS,
        id,
    };
    grant.sign(key).map_err(|e| fail(e.to_string()))
}

impl HostLink {
    /// Connects with a token that this node grants itself (`session_token`), proves who
    /// both sides are, and asks the host what it serves.
    ///
    /// # Errors
    /// [`ChatError::ShardUnavailable`] naming the host and the reason.
    pub async fn connect(
        addr: &HostAddr,
        key: &NodeKey,
        config: Config,
    ) -> Result<Self, ChatError> {
        let token = session_token(key, addr.node)?;
        Self::connect_with(addr, key, token, config).await
    }

    /// The same with a token that the host granted for this session. A token is good for one
    /// session.
    pub(crate) async fn connect_with(
        addr: &HostAddr,
        key: &NodeKey,
        token: Vec<u8>,
        config: Config,
    ) -> Result<Self, ChatError> {
        let identity = Identity::from_secret(&key.secret())
            .map_err(|e| ChatError::Engine(format!("cannot use this node's key: {e}")))?;
        let lifetime = config.session_lifetime;
        let hello = Hello::new(PIPELINE, token.clone());
        let expect = addr.node;
        let connection =
            hearthnet_transport::connect(&addr.endpoint, &identity, expect, hello, config)
                .await
                .map_err(|error| {
                    let code = error.code();
                    let name = code.map(|code| format!("{}: ", code.as_str()));
                    // A grant is made anew for each session, so only a clock makes it expire.
                    let clocks = match code {
                        Some(CloseCode::TokenExpired) => CLOCKS,
                        _ => "",
                    };
                    unavailable(addr, &format!("{}{error}{clocks}", name.unwrap_or_default()))
                })?;
        Self::over(addr, &token, connection, lifetime).await
    }

    /// The same over a connection that stands, opened with `token` and the purpose [`PIPELINE`]: to
    /// layers that this very process serves.
    pub(crate) async fn over(
        addr: &HostAddr,
        token: &[u8],
        mut connection: Connection,
        lifetime: Duration,
    ) -> Result<Self, ChatError> {
        let session = SessionId::of_token(token);
        // What begins in the last quarter of a session might not end with it.
        let stale_at = Instant::now() + lifetime * 3 / 4;
        let unavailable = |why: String| unavailable(addr, &why);
        let sender = connection.sender();
        sender
            .send(Message::Describe)
            .await
            .map_err(|e| unavailable(e.to_string()))?;
        let described = tokio::time::timeout(DESCRIBE_DEADLINE, describe(&mut connection)).await;
        let bytes = described
            .map_err(|_| unavailable("it did not describe itself in time".into()))?
            .map_err(&unavailable)?;
        let descriptor =
            Descriptor::from_cbor(&bytes).map_err(|e| unavailable(format!("{}: {e}", e.code())))?;
        if descriptor.host != addr.node {
            return Err(unavailable(
                "bad_descriptor: it describes another node".into(),
            ));
        }
        let streams = Streams::default();
        connection.attend(Reader {
            host: addr.node,
            sender: sender.clone(),
            closer: connection.closer(),
            streams: Arc::clone(&streams),
            arrived: Vec::new(),
        });
        Ok(Self {
            addr: addr.clone(),
            descriptor,
            session,
            sender,
            streams,
            connection,
            stale_at,
        })
    }

    /// Whether this process itself is the host.
    pub(crate) fn is_here(&self) -> bool {
        self.connection.is_here()
    }

    /// Ends the session from outside, when the right to it has ended: chats that run over it hear
    /// why, and go on elsewhere.
    pub(crate) fn closer(&self) -> Closer {
        self.connection.closer()
    }

    /// Whether the session still goes on.
    pub(crate) fn is_open(&self) -> bool {
        self.sender.closed().is_none() && self.streams.lock().ended.is_none()
    }

    /// Whether the host is about to leave: it takes nothing new.
    pub(crate) fn is_leaving(&self) -> bool {
        self.streams.lock().leaving
    }

    /// Whether something new may begin on it: it is open, and its host stays.
    pub(crate) fn takes_streams(&self) -> bool {
        self.is_open() && !self.is_leaving()
    }

    /// Whether another call should begin on it: as [`Self::takes_streams`], and it is far from the
    /// end of its lifetime.
    pub(crate) fn is_fresh(&self) -> bool {
        self.takes_streams() && Instant::now() < self.stale_at
    }

    /// Whether it was heard so recently that there is no use in asking. Whoever asks when it was
    /// not asks less than 4 times a second, which is what a host answers.
    pub(crate) fn was_heard_just_now(&self) -> bool {
        self.sender.silent_for() < JUST_NOW
    }

    /// Whether the host is there: it was heard a moment ago, or is within `limit`. One that has
    /// been asked for longer already is not waited for again.
    pub async fn answers(&self, limit: Duration) -> bool {
        if self.was_heard_just_now() {
            return self.is_open();
        }
        let left = match self.sender.unanswered_for() {
            Some(asked) => limit.saturating_sub(asked),
            None => limit,
        };
        let answers = tokio::time::timeout(left, self.sender.answers()).await;
        answers.unwrap_or(false)
    }

    /// Reserves a stream number whose messages go to `inbox`.
    pub(crate) fn register(&self, hop: u64, epoch: u32, inbox: Inbox) -> u32 {
        let mut routes = self.streams.lock();
        routes.last += 1;
        let stream = routes.last;
        if let Some(ended) = &routes.ended {
            // The session ended before the chat came: tell it, nobody else will.
            let _ = inbox.send((hop, Inbound::Lost(ended.clone())));
            return stream;
        }
        if routes.leaving {
            let _ = inbox.send((hop, Inbound::Leaving));
        }
        let route = Route {
            hop,
            inbox,
            epoch,
            resting: false,
        };
        routes.by_stream.insert(stream, route);
        stream
    }

    /// Says whether something is asked of a stream. One that rests is closed when its host
    /// leaves, and its chat hears [`Inbound::Closed`].
    pub(crate) fn rest(&self, stream: u32, resting: bool) {
        let mut routes = self.streams.lock();
        if let Some(route) = routes.by_stream.get_mut(&stream) {
            route.resting = resting;
        }
        if routes.leaving {
            routes.let_go(&self.sender);
        }
    }

    /// Ends a stream: both sides free what belongs to it at once.
    pub(crate) fn release(&self, stream: u32) {
        if let Some(route) = self.streams.lock().by_stream.remove(&stream) {
            close(&self.sender, stream, route.epoch);
        }
    }
}

impl Routes {
    /// Closes the streams of a leaving host that rest.
    fn let_go(&mut self, sender: &Sender) {
        for (stream, route) in self.by_stream.extract_if(|_, route| route.resting) {
            close(sender, stream, route.epoch);
            let _ = route.inbox.send((route.hop, Inbound::Closed));
        }
    }
}

/// Tells the host that a stream has ended. This never waits.
fn close(sender: &Sender, stream: u32, epoch: u32) {
    // A session that is gone has freed the stream already.
    let _ = sender.try_send(Message::StreamClose(StreamClose { stream, epoch }));
}

/// Waits for the host's descriptor; nothing else may come first.
async fn describe(connection: &mut Connection) -> Result<bytes::Bytes, String> {
    match connection.recv().await {
        Ok(Message::Descriptor(bytes)) => Ok(bytes),
        Ok(Message::Leaving { .. }) => Err("shutting_down: it is about to stop".into()),
        Ok(_) => Err("protocol_state: it sent something else than its descriptor".into()),
        Err(closed) => Err(closed.to_string()),
    }
}

/// Most messages that are looked at together.
const AT_ONCE: usize = 64;

/// Hands every message to the chat that owns its stream, until the session ends.
struct Reader {
    host: NodeId,
    sender: Sender,
    closer: Closer,
    streams: Streams,
    /// What has come together so far: a batch's results arrive in one piece.
    arrived: Vec<Message>,
}

impl Handler for Reader {
    fn message(&mut self, message: Message) -> Result<(), CloseCode> {
        self.arrived.push(message);
        if self.arrived.len() >= AT_ONCE {
            self.drained();
        }
        Ok(())
    }

    fn drained(&mut self) {
        for message in std::mem::take(&mut self.arrived) {
            self.hand_out(message);
        }
    }

    fn ended(mut self: Box<Self>, closed: &SessionClosed) {
        if !closed.by_us {
            // What the host said before its end still counts.
            self.drained();
        }
        let ended = Ended::of(closed);
        let mut routes = self.streams.lock();
        for route in std::mem::take(&mut routes.by_stream).into_values() {
            let lost = Inbound::Lost(ended.clone());
            let _ = route.inbox.send((route.hop, lost));
        }
        routes.ended = Some(ended);
    }
}

impl Reader {
    /// Hands one message to the chat that owns its stream.
    ///
    /// A message about a stream or an epoch that no chat has asked for ends the session: the chat
    /// whose answer it takes the place of would wait for a host that seems busy.
    fn hand_out(&self, message: Message) {
        let (life, inbound) = match message {
            Message::StreamOpened(m) => ((m.stream, m.epoch), Inbound::Opened),
            Message::StepResult(result) => {
                let at = Instant::now();
                let life = (result.stream, result.epoch);
                (life, Inbound::Result { result, at })
            }
            Message::StreamError(m) => (
                (m.stream, m.epoch),
                Inbound::Error {
                    code: m.code,
                    // A host's own words: they reach logs, terminals and answers.
                    message: tame(&m.message).into_owned(),
                },
            ),
            Message::Leaving { within_ms } => {
                let mut routes = self.streams.lock();
                if !routes.leaving {
                    flight::record(Event::HostLeaving {
                        host: self.host,
                        within_ms: within_ms.into(),
                    });
                }
                routes.leaving = true;
                routes.let_go(&self.sender);
                for route in routes.by_stream.values() {
                    let _ = route.inbox.send((route.hop, Inbound::Leaving));
                }
                return;
            }
            // A host has nothing else to say; what it says for nobody is dropped below.
            _ => return,
        };
        let (stream, epoch) = life;
        let routes = self.streams.lock();
        let is_wrong = match routes.by_stream.get(&stream) {
            Some(route) if route.epoch == epoch => {
                // A chat that has gone away no longer listens; its stream is being closed.
                let _ = route.inbox.send((route.hop, inbound));
                false
            }
            Some(_) => true,
            // The message may have crossed the end of its stream.
            None => stream == 0 || stream > routes.last,
        };
        drop(routes);
        if is_wrong {
            self.closer.close(CloseCode::ProtocolState);
        }
    }
}

/// Ends the reason why a host refused a session grant that was made a moment ago.
const CLOCKS: &str = "; the clock of this machine or of that host is wrong: compare them (`date -u`), and \
     set it, for example with `timedatectl set-ntp true`";

fn unavailable(addr: &HostAddr, why: &str) -> ChatError {
    let said = format!("{} ({}): {why}", addr.endpoint, addr.node.short());
    ChatError::ShardUnavailable(tame(&said).into_owned())
}
