//! Session with one host, shared by all chats that use it.
//!
//! The transport's reader passes each message to the chat that owns the stream; chats send through
//! the session's sender. A chat waits on one queue for all of its hosts, so that the first answer
//! is processed first.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hearthnet_bus::flight::{self, Event, SessionId};
use hearthnet_bus::{Descriptor, Grant, NodeId, NodeKey};
use hearthnet_engine::ARITHMETIC;
use hearthnet_text::sanitize;
use hearthnet_transport::{
    CloseCode, Closer, Code, Config, Connection, Handler, Hello, Identity, Io, Message, Receipt,
    Sender, SessionClosed, SessionStats, StepResult, StreamClose, connect, connect_over,
};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::error::ChatError;
use crate::hosts::receipts::{ReceiptFault, StreamReceipts};

/// Address of a host as users write it: `ADDR:PORT#ed25519:KEY`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostAddr {
    /// `ADDR:PORT` or `NAME:PORT`.
    pub endpoint: String,
    /// Node id that the host must prove.
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

/// Message for a chat. It is queued together with the id of the chat's hop.
#[derive(Debug)]
pub(crate) enum Inbound {
    Opened,
    Result {
        result: StepResult,
        /// Time of arrival.
        at: Instant,
    },
    /// The positions that a stream holds after a truncation.
    Truncated(u32),
    Error {
        code: Code,
        /// Message from the host, sanitised.
        message: String,
    },
    /// A receipt of the host is wrong.
    BadReceipt(ReceiptFault),
    /// The host is leaving; the stream continues for a while.
    Leaving,
    /// The host is leaving, and the idle stream was closed.
    Closed,
    /// The session has ended.
    Lost(SessionClosed),
}

/// Queue of a chat.
pub(crate) type Inbox = mpsc::UnboundedSender<(u64, Inbound)>;

/// Destination of a stream's messages.
#[derive(Debug)]
struct Route {
    /// The chat's id for the hop, and its queue.
    hop: u64,
    inbox: Inbox,
    epoch: u32,
    /// True while the stream is idle; it then does not delay the host's shutdown.
    resting: bool,
    /// `None` if its host sends no receipts.
    receipts: Option<Arc<StreamReceipts>>,
}

/// Ended streams whose last receipt is still expected. It takes one round trip.
const MAX_CLOSING: usize = 64;

#[derive(Debug, Default)]
struct Routes {
    by_stream: BTreeMap<u32, Route>,
    /// Last stream number given out, from 1; 0 if none was.
    last: u32,
    leaving: bool,
    /// Ended streams whose last receipt has not come.
    closing: VecDeque<(u32, Arc<StreamReceipts>)>,
    /// End of the session, once it has ended.
    ended: Option<SessionClosed>,
}

type Streams = Arc<Mutex<Routes>>;

/// An authenticated session with one host.
#[derive(Debug)]
pub struct HostLink {
    pub(crate) addr: HostAddr,
    /// This node, as the host knows it.
    pub(crate) caller: NodeId,
    /// Descriptor that the host sent when the session began.
    pub(crate) descriptor: Descriptor,
    /// Id of the session in the flight records of both sides.
    pub(crate) session: SessionId,
    pub(crate) sender: Sender,
    streams: Streams,
    /// Closes the session when dropped.
    connection: Connection,
    /// Time after which new calls should use a new session.
    stale_at: Instant,
}

/// A host heard within this time counts as online.
const JUST_NOW: Duration = Duration::from_millis(300);

/// Time limit for the host's descriptor after the session is open.
const DESCRIBE_DEADLINE: Duration = Duration::from_secs(10);

/// Purpose of a session in its HELLO.
pub(crate) const PIPELINE: &str = "pipeline";

/// Validity of a self-signed session grant, in seconds: it is used at once.
const GRANT_SECONDS: u64 = 60;

/// Signs a token for one session with a host outside of a community: such a host lets admitted
/// nodes sign their own grants.
fn session_token(key: &NodeKey, host: NodeId) -> Result<Vec<u8>, ChatError> {
    let fail = |why: String| ChatError::Engine(format!("cannot sign a session token: {why}"));
    let grant = Grant::of_session(key.id(), key.id(), host, GRANT_SECONDS);
    let grant = grant.map_err(|e| fail(e.to_string()))?;
    grant.sign(key).map_err(|e| fail(e.to_string()))
}

impl HostLink {
    /// Connects with a self-signed token (`session_token`), authenticates both sides and requests
    /// the host's descriptor.
    ///
    /// # Errors
    /// [`ChatError::ShardUnavailable`], which names the host and the reason.
    pub async fn connect(
        addr: &HostAddr,
        key: &NodeKey,
        config: Config,
    ) -> Result<Self, ChatError> {
        let token = session_token(key, addr.node)?;
        Self::connect_with(addr, key, token, config).await
    }

    /// [`Self::connect`] over a byte stream, which leads to the host.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn connect_over(
        io: Box<dyn Io>,
        addr: &HostAddr,
        key: &NodeKey,
        config: Config,
    ) -> Result<Self, ChatError> {
        Self::open(Some(io), addr, key, session_token(key, addr.node)?, config).await
    }

    /// Connects with a token that the host granted. A token is valid for one session.
    pub(crate) async fn connect_with(
        addr: &HostAddr,
        key: &NodeKey,
        token: Vec<u8>,
        config: Config,
    ) -> Result<Self, ChatError> {
        Self::open(None, addr, key, token, config).await
    }

    /// Opens a session over a byte stream, or else over a connection to the host's address.
    async fn open(
        io: Option<Box<dyn Io>>,
        addr: &HostAddr,
        key: &NodeKey,
        token: Vec<u8>,
        config: Config,
    ) -> Result<Self, ChatError> {
        let identity = Identity::from_secret(&key.secret())
            .map_err(|e| ChatError::Engine(format!("cannot use this node's key: {e}")))?;
        let lifetime = config.session_lifetime;
        let hello = Hello::new(PIPELINE, token.clone());
        let (endpoint, expect) = (&addr.endpoint, addr.node);
        let connection = match io {
            Some(io) => connect_over(io, endpoint, &identity, expect, hello, config).await,
            None => connect(endpoint, &identity, expect, hello, config).await,
        };
        let connection = connection.map_err(|error| {
            let code = error.code();
            let name = code.map(|code| format!("{}: ", code.as_str()));
            // A grant is made anew for each session, so only a clock makes it expire.
            let clocks = match code {
                Some(CloseCode::TokenExpired) => CLOCKS,
                _ => "",
            };
            unavailable(
                addr,
                &format!("{}{error}{clocks}", name.unwrap_or_default()),
            )
        })?;
        Self::over(addr, key.id(), &token, connection, lifetime).await
    }

    /// Starts a session over an open connection, which `caller` opened with `token` and the purpose
    /// [`PIPELINE`]. The host may be this process.
    pub(crate) async fn over(
        addr: &HostAddr,
        caller: NodeId,
        token: &[u8],
        mut connection: Connection,
        lifetime: Duration,
    ) -> Result<Self, ChatError> {
        let session = SessionId::of_token(token);
        // A call that starts in the last quarter of the lifetime might outlast the session.
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
            caller,
            descriptor,
            session,
            sender,
            streams,
            connection,
            stale_at,
        })
    }

    /// Returns true if this process is the host.
    pub(crate) fn is_here(&self) -> bool {
        self.connection.is_here()
    }

    /// Returns true if the host was asked for receipts, and computes exactly.
    pub(crate) fn has_receipts(&self) -> bool {
        self.connection.receipts() > 0 && self.descriptor.arithmetic == ARITHMETIC
    }

    /// Returns true if the host computes exactly, was asked for receipts, and sends none.
    pub(crate) fn refuses_receipts(&self) -> bool {
        self.connection.refuses_receipts() && self.descriptor.arithmetic == ARITHMETIC
    }

    /// Handle that closes the session when its authorisation ends. Chats on it are notified and
    /// continue elsewhere.
    pub fn closer(&self) -> Closer {
        self.connection.closer()
    }

    /// Statistics of the session: credit, steps in flight, bytes.
    pub fn stats(&self) -> SessionStats {
        self.sender.stats()
    }

    /// Returns true until the session has ended.
    pub fn is_open(&self) -> bool {
        self.sender.closed().is_none() && self.streams.lock().ended.is_none()
    }

    /// Returns true if the host is leaving and accepts no new streams.
    pub(crate) fn is_leaving(&self) -> bool {
        self.streams.lock().leaving
    }

    /// Returns true if the session is open and its host is not leaving.
    pub fn takes_streams(&self) -> bool {
        self.is_open() && !self.is_leaving()
    }

    /// Returns true if a new call should use the session: [`Self::takes_streams`], and not near the
    /// end of its lifetime.
    pub(crate) fn is_fresh(&self) -> bool {
        self.takes_streams() && Instant::now() < self.stale_at
    }

    /// Returns true if the host was heard within 300 ms, so that a probe is needless. Probes are
    /// thus sent less than 4 times a second, which is the rate that hosts answer.
    pub(crate) fn was_heard_just_now(&self) -> bool {
        self.sender.silent_for() < JUST_NOW
    }

    /// Returns true if the host was heard just now or answers a probe within `limit`. Time since an
    /// earlier unanswered probe counts towards the limit.
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

    /// Reserves a stream number. The stream's messages go to `inbox`, its receipts to what
    /// `receipts` returns for the number.
    pub(crate) fn register(
        &self,
        hop: u64,
        epoch: u32,
        inbox: Inbox,
        receipts: impl FnOnce(u32) -> Option<Arc<StreamReceipts>>,
    ) -> (u32, Option<Arc<StreamReceipts>>) {
        let mut routes = self.streams.lock();
        routes.last += 1;
        let stream = routes.last;
        let receipts = receipts(stream);
        if let Some(ended) = &routes.ended {
            // The session has already ended: no other message will tell the chat.
            let _ = inbox.send((hop, Inbound::Lost(ended.clone())));
            return (stream, receipts);
        }
        if routes.leaving {
            let _ = inbox.send((hop, Inbound::Leaving));
        }
        let route = Route {
            hop,
            inbox,
            epoch,
            resting: false,
            receipts: receipts.clone(),
        };
        routes.by_stream.insert(stream, route);
        (stream, receipts)
    }

    /// Marks a stream as idle or active. An idle stream is closed when its host leaves; its chat
    /// gets [`Inbound::Closed`].
    pub(crate) fn rest(&self, stream: u32, resting: bool) {
        let mut routes = self.streams.lock();
        if let Some(route) = routes.by_stream.get_mut(&stream) {
            route.resting = resting;
        }
        if routes.leaving {
            routes.close_idle(&self.sender);
        }
    }

    /// Closes a stream, so that both sides free its memory at once.
    pub(crate) fn release(&self, stream: u32) {
        let mut routes = self.streams.lock();
        if let Some(route) = routes.by_stream.remove(&stream) {
            close(&self.sender, stream, route.epoch);
            routes.await_receipt(stream, route.receipts);
        }
    }
}

impl Routes {
    /// Closes the idle streams of a leaving host.
    fn close_idle(&mut self, sender: &Sender) {
        let idle = self.by_stream.extract_if(.., |_, route| route.resting);
        for (stream, route) in idle.collect::<Vec<_>>() {
            close(sender, stream, route.epoch);
            let _ = route.inbox.send((route.hop, Inbound::Closed));
            self.await_receipt(stream, route.receipts);
        }
    }

    /// The last receipt of a stream comes after its end.
    fn await_receipt(&mut self, stream: u32, receipts: Option<Arc<StreamReceipts>>) {
        if self.closing.len() == MAX_CLOSING {
            self.closing.pop_front();
        }
        self.closing
            .extend(receipts.map(|receipts| (stream, receipts)));
    }
}

/// Sends STREAM_CLOSE. Never blocks.
fn close(sender: &Sender, stream: u32, epoch: u32) {
    // If the session has ended, the host has already freed the stream.
    let _ = sender.try_send(Message::StreamClose(StreamClose { stream, epoch }));
}

/// Waits for the host's descriptor, which must be the first message.
async fn describe(connection: &mut Connection) -> Result<bytes::Bytes, String> {
    match connection.recv().await {
        Ok(Message::Descriptor(bytes)) => Ok(bytes),
        Ok(Message::Leaving { .. }) => Err("shutting_down: it is about to stop".into()),
        Ok(_) => Err("protocol_state: it sent another message instead of its descriptor".into()),
        Err(closed) => Err(closed.to_string()),
    }
}

/// Maximum number of messages that are processed together.
const AT_ONCE: usize = 64;

/// Passes every message to the chat that owns its stream, until the session ends.
struct Reader {
    host: NodeId,
    sender: Sender,
    closer: Closer,
    streams: Streams,
    /// Messages not processed yet: the results of a batch arrive together.
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
            // Messages that arrived before the end still count.
            self.drained();
        }
        let mut routes = self.streams.lock();
        for route in std::mem::take(&mut routes.by_stream).into_values() {
            let lost = Inbound::Lost(closed.clone());
            let _ = route.inbox.send((route.hop, lost));
        }
        routes.closing.clear();
        routes.ended = Some(closed.clone());
    }
}

impl Reader {
    /// Passes one message to the chat that owns its stream.
    ///
    /// A message for a stream or an epoch that was never opened closes the session. It may have
    /// replaced the answer to a chat, which would otherwise wait for a host that seems busy.
    fn hand_out(&self, message: Message) {
        let (life, inbound) = match message {
            Message::StreamOpened(m) => ((m.stream, m.epoch), Inbound::Opened),
            Message::StepResult(result) => {
                let at = Instant::now();
                let life = (result.stream, result.epoch);
                (life, Inbound::Result { result, at })
            }
            Message::Truncated(m) => ((m.stream, m.epoch), Inbound::Truncated(m.position)),
            Message::StreamError(m) => (
                (m.stream, m.epoch),
                Inbound::Error {
                    code: m.code,
                    // Untrusted text: it reaches logs, terminals and answers.
                    message: sanitize(&m.message).into_owned(),
                },
            ),
            Message::Receipt(receipt) => return self.certified(receipt),
            Message::Leaving { within_ms } => {
                let mut routes = self.streams.lock();
                if !routes.leaving {
                    flight::record(Event::HostLeaving {
                        host: self.host,
                        within_ms: within_ms.into(),
                    });
                }
                routes.leaving = true;
                routes.close_idle(&self.sender);
                for route in routes.by_stream.values() {
                    let _ = route.inbox.send((route.hop, Inbound::Leaving));
                }
                return;
            }
            // No other message is addressed to a stream.
            _ => return,
        };
        let (stream, epoch) = life;
        let routes = self.streams.lock();
        let is_wrong = match routes.by_stream.get(&stream) {
            Some(route) if route.epoch == epoch => {
                // If the chat is gone, its stream is being closed.
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

impl Reader {
    /// Compares a receipt with the rows of its stream.
    fn certified(&self, receipt: Receipt) {
        let stream = receipt.stream;
        let routes = self.streams.lock();
        let (receipts, chat) = match routes.by_stream.get(&stream) {
            Some(route) if route.epoch == receipt.epoch => {
                let chat = (route.hop, route.inbox.clone());
                (route.receipts.clone(), Some(chat))
            }
            None if stream > 0 && stream <= routes.last => {
                let mut closing = routes.closing.iter();
                let ended = closing.find(|(ended, _)| *ended == stream);
                (ended.map(|(_, receipts)| Arc::clone(receipts)), None)
            }
            _ => {
                drop(routes);
                return self.closer.close(CloseCode::ProtocolState);
            }
        };
        drop(routes);
        let Some(receipts) = receipts else {
            return;
        };
        let compared = receipts.look(|ledger| ledger.received(receipt));
        match (compared, chat) {
            (Ok(()), _) => {}
            // If the chat is gone meanwhile, nothing depends on these rows any more.
            (Err(fault), Some((hop, inbox))) => {
                let _ = inbox.send((hop, Inbound::BadReceipt(fault)));
            }
            (Err(fault), None) => receipts.blame(fault),
        }
    }
}

/// Ends the reason why a host refused a session grant that was made a moment ago.
const CLOCKS: &str = "; the clock of this machine or of that host is wrong: compare them (`date -u`), and \
     set it, for example with `timedatectl set-ntp true`";

fn unavailable(addr: &HostAddr, why: &str) -> ChatError {
    let said = format!("{} ({}): {why}", addr.endpoint, addr.node.short());
    ChatError::ShardUnavailable(sanitize(&said).into_owned())
}
