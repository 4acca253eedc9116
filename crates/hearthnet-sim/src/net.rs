//! The network: byte streams with delays, in virtual time.
//!
//! Each direction of a connection delivers its bytes in order, each write after a delay of its own.
//! So bytes of different connections overtake each other. Faults belong to the *way* from one node
//! to another: it is blocked, or slow, or damages bytes. As in TCP, a blocked way loses nothing: its
//! bytes arrive once it is open again, unless a side has given up by then.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hearthnet_transport::Io;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

use crate::random::Random;

/// Number of a node.
pub(crate) type Node = usize;

/// Bytes on the way in one direction of a connection before its writer waits, as in a socket.
const SOCKET_BYTES: usize = 256 * 1024;
/// Time after which a connection that is not accepted is given up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Milliseconds that a write travels: least and most.
const DELAY: (u64, u64) = (1, 4);

/// State of the way from one node to another.
#[derive(Debug, Clone, Default)]
struct Way {
    /// Number of faults that block it.
    blocked: u32,
    /// Factor of delays, 0 for none.
    slow: u64,
    /// Number of next writes in which a bit changes.
    damaged: u32,
}

/// Ways between a node and others, for faults of the network.
pub(crate) struct Ways<'a> {
    pub(crate) net: &'a Net,
    pub(crate) node: Node,
    pub(crate) others: Vec<Node>,
}

/// Direction of packets, as the node of [`Ways`] sees it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    In,
    Out,
    Both,
}

impl Ways<'_> {
    fn change(&self, direction: Direction, change: impl Fn(&mut Way)) {
        for &other in &self.others {
            if direction != Direction::Out {
                self.net.change(other, self.node, &change);
            }
            if direction != Direction::In {
                self.net.change(self.node, other, &change);
            }
        }
    }

    /// Adds `by` to the number of faults that block each way: 1 when a fault begins, -1 when it ends.
    pub(crate) fn block(&self, direction: Direction, by: i32) {
        self.change(direction, |way| {
            way.blocked = way.blocked.saturating_add_signed(by);
        });
    }

    /// Blocks the ways until `over`.
    pub(crate) async fn blocked(&self, direction: Direction, over: Sleep) {
        self.block(direction, 1);
        over.await;
        self.block(direction, -1);
    }

    /// Lets packets take 40 times as long until `over`.
    pub(crate) async fn slow(&self, over: Sleep) {
        self.change(Direction::Both, |way| way.slow = 40);
        over.await;
        self.change(Direction::Both, |way| way.slow = 0);
    }

    /// Changes a bit of the next packet to each of the others.
    pub(crate) fn damage(&self) {
        self.change(Direction::Out, |way| way.damaged += 1);
    }
}

/// A direction of a connection.
struct Pipe {
    from: Node,
    to: Node,
    on_the_way: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    /// When the last write arrives.
    last: Instant,
    random: Random,
    /// When the end arrives, and whether it is a reset.
    end: Option<(Instant, bool)>,
    reader: Option<Waker>,
    writer: Option<Waker>,
    /// The process of the writer, or of the reader, was killed.
    writer_killed: bool,
    reader_killed: bool,
    /// Ends of the connection that still use it.
    users: u8,
    /// Its session is open.
    established: bool,
    /// Bytes since [`Net::count_from_now`].
    counted: Option<usize>,
}

struct State {
    seed: u64,
    ways: BTreeMap<(Node, Node), Way>,
    pipes: BTreeMap<u64, Pipe>,
    /// Directions of connections so far.
    opened: u64,
    listeners: BTreeMap<Node, UnboundedSender<Box<dyn Io>>>,
    /// Most bytes that any direction of a connection took after [`Net::count_from_now`].
    most_counted: usize,
    /// Random numbers for connections, by way: those of other ways change nothing.
    random: BTreeMap<(Node, Node), Random>,
}

/// The network. Clones share it.
#[derive(Clone)]
pub(crate) struct Net {
    state: Arc<Mutex<State>>,
    opened: Arc<Notify>,
}

impl State {
    fn way(&self, from: Node, to: Node) -> Way {
        self.ways.get(&(from, to)).cloned().unwrap_or_default()
    }

    fn is_blocked(&self, from: Node, to: Node) -> bool {
        self.way(from, to).blocked > 0
    }

    fn random_of(&mut self, from: Node, to: Node) -> &mut Random {
        let random = self.random.entry((from, to));
        random.or_insert_with(|| Random::new(self.seed, (1 + from * 100 + to) as u64))
    }

    fn wake_all(&mut self) {
        for pipe in self.pipes.values_mut() {
            let wakers = [pipe.reader.take(), pipe.writer.take()];
            wakers.into_iter().flatten().for_each(Waker::wake);
        }
    }
}

fn delay(random: &mut Random, way: &Way) -> Duration {
    Duration::from_millis(random.between(DELAY.0, DELAY.1) * way.slow.max(1))
}

impl Net {
    pub(crate) fn new(seed: u64) -> Self {
        let state = State {
            seed,
            ways: BTreeMap::new(),
            pipes: BTreeMap::new(),
            opened: 0,
            listeners: BTreeMap::new(),
            most_counted: 0,
            random: BTreeMap::new(),
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            opened: Arc::default(),
        }
    }

    /// Connections to `node`. It accepts them until [`Self::kill`], and again after the next call.
    pub(crate) fn listen(&self, node: Node) -> UnboundedReceiver<Box<dyn Io>> {
        let (arrived, arrivals) = unbounded_channel();
        self.state.lock().listeners.insert(node, arrived);
        arrivals
    }

    /// Ends a process: its sockets are gone, and the kernel resets their connections.
    pub(crate) fn kill(&self, node: Node) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.listeners.remove(&node);
        for pipe in state.pipes.values_mut() {
            if pipe.from == node {
                let at = pipe.last.max(now + Duration::from_millis(DELAY.0));
                pipe.end = Some((at, true));
                pipe.writer_killed = true;
            } else if pipe.to == node {
                pipe.reader_killed = true;
            }
        }
        state.wake_all();
    }

    /// Changes the way from one node to another.
    fn change(&self, from: Node, to: Node, change: impl FnOnce(&mut Way)) {
        let mut state = self.state.lock();
        change(state.ways.entry((from, to)).or_default());
        state.wake_all();
        self.opened.notify_waiters();
    }

    /// The sessions of all connections from one node to another are open.
    pub(crate) fn established(&self, from: Node, to: Node) {
        self.way_pipes(from, to, |pipe| pipe.established = true);
    }

    /// Counts what one node sends to another from now on in the sessions that are open.
    pub(crate) fn count_from_now(&self, from: Node, to: Node) {
        self.way_pipes(from, to, |pipe| {
            if pipe.established {
                pipe.counted.get_or_insert(0);
            }
        });
    }

    fn way_pipes(&self, from: Node, to: Node, change: impl FnMut(&mut Pipe)) {
        let mut state = self.state.lock();
        let pipes = state.pipes.values_mut();
        let of_way = pipes.filter(|pipe| (pipe.from, pipe.to) == (from, to));
        of_way.for_each(change);
    }

    /// Most bytes of any session since [`Self::count_from_now`].
    pub(crate) fn most_counted(&self) -> usize {
        self.state.lock().most_counted
    }

    /// Number of directions of connections whose ends are not all closed.
    pub(crate) fn open_pipes(&self) -> usize {
        self.state.lock().pipes.len()
    }

    /// Waits for a packet to go from one node to another.
    async fn cross(&self, from: Node, to: Node) {
        let pause = {
            let mut state = self.state.lock();
            let way = state.way(from, to);
            delay(state.random_of(from, to), &way)
        };
        sleep(pause).await;
        loop {
            let opened = self.opened.notified();
            if !self.state.lock().is_blocked(from, to) {
                return;
            }
            opened.await;
        }
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// If nothing listens there, or no answer comes in time.
    pub(crate) async fn connect(&self, from: Node, to: Node) -> io::Result<Box<dyn Io>> {
        let crossing = async {
            self.cross(from, to).await;
            self.cross(to, from).await;
        };
        timeout(CONNECT_TIMEOUT, crossing)
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        let mut state = self.state.lock();
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let listener = state.listeners.get(&to).cloned().ok_or_else(refused)?;
        let (there, back) = (state.opened, state.opened + 1);
        state.opened += 2;
        for (id, from, to) in [(there, from, to), (back, to, from)] {
            let random = Random::new(state.random_of(from, to).draw(), 0);
            let pipe = Pipe {
                from,
                to,
                on_the_way: VecDeque::new(),
                bytes: 0,
                last: Instant::now(),
                random,
                end: None,
                reader: None,
                writer: None,
                writer_killed: false,
                reader_killed: false,
                users: 2,
                established: false,
                counted: None,
            };
            state.pipes.insert(id, pipe);
        }
        drop(state);
        let end = |reads, writes| Socket {
            net: self.clone(),
            reads,
            writes,
            timer: None,
        };
        let (accepted, own) = (end(there, back), end(back, there));
        listener.send(Box::new(accepted)).map_err(|_| refused())?;
        Ok(Box::new(own))
    }
}

/// An end of a connection.
struct Socket {
    net: Net,
    reads: u64,
    writes: u64,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Socket {
    /// Sleeps until `at`. Pending unless that is over.
    fn until(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        timer.as_mut().poll(cx)
    }
}

fn reset() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let now = Instant::now();
        let net = self.net.clone();
        let mut state = net.state.lock();
        let State { ways, pipes, .. } = &mut *state;
        let Some(pipe) = pipes
            .get_mut(&self.reads)
            .filter(|pipe| !pipe.reader_killed)
        else {
            return Poll::Ready(Err(reset()));
        };
        let way = ways.get(&(pipe.from, pipe.to));
        let is_blocked = way.is_some_and(|way| way.blocked > 0);
        pipe.reader = Some(cx.waker().clone());
        if is_blocked {
            return Poll::Pending;
        }
        let next = match pipe.on_the_way.front_mut() {
            Some((at, bytes)) if *at <= now => {
                let taken = bytes.len().min(buffer.remaining());
                buffer.put_slice(bytes.drain(..taken).as_slice());
                if bytes.is_empty() {
                    pipe.on_the_way.pop_front();
                }
                pipe.bytes -= taken;
                if let Some(writer) = pipe.writer.take() {
                    writer.wake();
                }
                return Poll::Ready(Ok(()));
            }
            Some((at, _)) => *at,
            None => match pipe.end {
                Some((at, true)) if at <= now => return Poll::Ready(Err(reset())),
                Some((at, false)) if at <= now => return Poll::Ready(Ok(())),
                Some((at, _)) => at,
                None => return Poll::Pending,
            },
        };
        drop(state);
        if self.until(next, cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let now = Instant::now();
        let mut state = self.net.state.lock();
        let State {
            ways,
            pipes,
            most_counted,
            ..
        } = &mut *state;
        let Some(pipe) = pipes
            .get_mut(&self.writes)
            .filter(|pipe| !pipe.writer_killed)
        else {
            return Poll::Ready(Err(reset()));
        };
        let way = ways.entry((pipe.from, pipe.to)).or_default();
        // The peer is gone: the system takes the bytes until its reset arrives.
        if pipe.reader_killed || pipe.users < 2 {
            return Poll::Ready(Ok(bytes.len()));
        }
        if pipe.end.is_some() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if pipe.bytes >= SOCKET_BYTES {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let mut sent = bytes.to_vec();
        if way.damaged > 0 {
            way.damaged -= 1;
            let at = pipe.random.below(sent.len() as u64) as usize;
            if let Some(byte) = sent.get_mut(at) {
                *byte ^= 1 << pipe.random.below(8);
            }
        }
        if let Some(counted) = &mut pipe.counted {
            *counted += sent.len();
            *most_counted = (*most_counted).max(*counted);
        }
        pipe.last = pipe.last.max(now + delay(&mut pipe.random, way));
        pipe.bytes += sent.len();
        pipe.on_the_way.push_back((pipe.last, sent));
        if let Some(reader) = pipe.reader.take() {
            reader.wake();
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.finish();
        Poll::Ready(Ok(()))
    }
}

impl Socket {
    /// No more bytes follow.
    fn finish(&self) {
        let now = Instant::now();
        let mut state = self.net.state.lock();
        if let Some(pipe) = state.pipes.get_mut(&self.writes)
            && pipe.end.is_none()
            && !pipe.writer_killed
        {
            let at = pipe.last.max(now + Duration::from_millis(DELAY.0));
            pipe.end = Some((at, false));
            if let Some(reader) = pipe.reader.take() {
                reader.wake();
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.finish();
        let mut state = self.net.state.lock();
        for id in [self.reads, self.writes] {
            if let Some(pipe) = state.pipes.get_mut(&id) {
                pipe.users -= 1;
                if pipe.users == 0 {
                    state.pipes.remove(&id);
                }
            }
        }
    }
}
