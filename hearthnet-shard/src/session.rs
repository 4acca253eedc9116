//! Session of each purpose. The transport's task that reads the socket also checks the
//! caller's messages ([`StreamTable`]); the session's task watches for the end of the host.

use std::sync::Arc;

use hearthnet_transport::{CloseCode, Connection, Message, SendError, Sender, StreamOpened};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::admission::BENCH;
use crate::compute::Running;
use crate::events::Caller;
use crate::stream_handle::ResponseSink;
use crate::stream_table::{HostState, StreamTable};

/// Phase of a host's shutdown.
///
/// ```text
///            asked to stop           no stream left, or `until`
///  Serving ----------------> Leaving --------------------------> Closing
///                            LEAVING to every session            BYE to every session
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Accepts connections and streams.
    Serving,
    /// Accepts neither; open streams go on.
    Leaving {
        /// Deadline for open streams.
        until: Instant,
    },
    /// Closing the sessions.
    Closing,
}

/// Signals that end a session from the host's side.
#[derive(Debug, Clone)]
pub(crate) struct ShutdownWatch {
    pub(crate) phase: watch::Receiver<Phase>,
    pub(crate) compute: watch::Receiver<Running>,
}

impl ShutdownWatch {
    /// Sends LEAVING when the host begins to leave. Resolves with the close code when the host
    /// closes its sessions.
    async fn watch(self, sender: Sender) -> CloseCode {
        let announcing = self.clone().announce(sender);
        tokio::select! {
            biased;
            code = self.comes() => code,
            never = announcing => never,
        }
    }

    /// Sends LEAVING when the host begins to leave, with the milliseconds until it will be gone.
    /// Never resolves.
    async fn announce(mut self, sender: Sender) -> CloseCode {
        let leaves = |phase: &Phase| matches!(phase, Phase::Leaving { .. });
        // An error means that the host is gone, which `comes` reports.
        let phase = self.phase.wait_for(leaves).await.map(|phase| *phase);
        if let Ok(Phase::Leaving { until }) = phase {
            let left = until.saturating_duration_since(Instant::now());
            let within_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
            // Never waits. A failed send means that the session has ended.
            let _ = sender.send(Message::Leaving { within_ms }).await;
        }
        std::future::pending().await
    }

    /// Resolves with the close code when the host closes its sessions.
    async fn comes(mut self) -> CloseCode {
        // An error means that the host, or its compute thread, is gone.
        tokio::select! {
            biased;
            _ = self.phase.wait_for(|phase| *phase == Phase::Closing) => CloseCode::Shutdown,
            state = self.compute.wait_for(|state| *state != Running::Yes) => match state {
                Ok(state) if *state == Running::Ended => CloseCode::Shutdown,
                _ => CloseCode::Internal,
            },
        }
    }
}

/// Serves a session until it or the host ends.
pub(crate) async fn serve(
    mut connection: Connection,
    host_state: Arc<HostState>,
    end: ShutdownWatch,
    max_unread: u64,
) {
    let party = (host_state.parties)(&connection.peer());
    let (events, caller) = (&host_state.events, Caller::of(&connection, party));
    events.session_began(caller, connection.purpose());
    let code = match connection.purpose() {
        BENCH => echo(&mut connection, &host_state, end).await,
        _ => pipeline(&mut connection, &host_state, caller, end, max_unread).await,
    };
    if let Some(code) = code {
        connection.close(code);
    }
    // The session's streams have ended when this resolves.
    let closed = connection.ended().await;
    events.session_ended(caller, closed.code, closed.by_us);
}

/// Runs the caller's rows. Returns the code to close with, or `None` if the session has ended.
async fn pipeline(
    connection: &mut Connection,
    host_state: &Arc<HostState>,
    caller: Caller,
    end: ShutdownWatch,
    max_unread: u64,
) -> Option<CloseCode> {
    let sink = Arc::new(SessionSink {
        sender: connection.sender(),
        max_unread,
    });
    // Ends the session's streams when it is dropped at the end of the session.
    connection.attend(StreamTable::new(Arc::clone(host_state), caller, sink));
    tokio::select! {
        biased;
        code = end.watch(connection.sender()) => Some(code),
        _ = connection.ended() => None,
    }
}

/// Echoes tensors, and for each step the rows that it wants, to benchmark the transport.
async fn echo(
    connection: &mut Connection,
    host_state: &HostState,
    end: ShutdownWatch,
) -> Option<CloseCode> {
    let sender = connection.sender();
    let end = end.watch(connection.sender());
    let echo = async {
        loop {
            let answer = match connection.recv().await.ok()? {
                Message::Describe => match host_state.description() {
                    Ok(description) => description,
                    Err(code) => return Some(code),
                },
                message => match echoed(message) {
                    Some(answer) => answer,
                    None => continue,
                },
            };
            // The transport's deadlines end a peer that does not read.
            match sender.send(answer).await {
                Ok(()) => {}
                Err(SendError::Message(violation)) => return Some(violation.code),
                Err(_) => return None,
            }
        }
    };
    tokio::select! {
        biased;
        code = end => Some(code),
        code = echo => code,
    }
}

fn echoed(message: Message) -> Option<Message> {
    match message {
        Message::Tensor(tensor) => Some(Message::Tensor(tensor)),
        Message::StreamOpen(open) => {
            let opened = StreamOpened {
                stream: open.stream,
                epoch: open.epoch,
            };
            Some(Message::StreamOpened(opened))
        }
        Message::Step(step) => Some(Message::StepResult(step.echo())),
        _ => None,
    }
}

/// Sends messages from any thread. Answers never wait, so a peer that does not read is disconnected
/// once more than `max_unread` bytes are queued for it.
struct SessionSink {
    sender: Sender,
    max_unread: u64,
}

impl ResponseSink for SessionSink {
    fn send_all(&self, messages: Vec<Message>) {
        match self.sender.try_send_all(&messages) {
            Ok(0) if self.sender.stats().queued_bytes <= self.max_unread => {}
            Ok(_) => self.sender.close(CloseCode::CreditStall),
            // The session's task handles the end.
            Err(SendError::Closed(_)) => {}
            Err(error) => {
                let code = match &error {
                    SendError::Message(violation) => violation.code,
                    _ => CloseCode::Internal,
                };
                tracing::warn!(%code, "an answer could not be sent: {error}");
                self.sender.close(code);
            }
        }
    }
}
