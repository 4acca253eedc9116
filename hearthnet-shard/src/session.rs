//! One session, for each purpose. The caller's rows are judged by the transport's own task as they
//! come ([`Handler`]); the session's task watches for what ends it from outside.

use std::sync::Arc;

use hearthnet_transport::{
    CloseCode, Connection, Handler, Message, SendError, Sender, StreamOpened, bench,
};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::admission::BENCH;
use crate::compute::Running;
use crate::events::Caller;
use crate::stream_handle::Outlet;
use crate::stream_table::{HostState, StreamTable};

/// How far the host has come with its end.
///
/// ```text
///            asked to stop           no stream left, or `until`
///  Serving ----------------> Leaving --------------------------> Closing
///                            LEAVING to every session            BYE to every session
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Taking connections and streams.
    Serving,
    /// Taking neither; the streams that are open go on.
    Leaving {
        /// When it ends, whatever is open then.
        until: Instant,
    },
    /// Closing the sessions.
    Closing,
}

/// What sessions have to watch for besides their peer.
#[derive(Debug, Clone)]
pub(crate) struct End {
    pub(crate) phase: watch::Receiver<Phase>,
    pub(crate) compute: watch::Receiver<Running>,
}

impl End {
    /// Resolves when the host begins to leave: in how many milliseconds it will be gone.
    async fn announced(mut self) -> u32 {
        let leaves = |phase: &Phase| matches!(phase, Phase::Leaving { .. });
        let phase = self.phase.wait_for(leaves).await.map(|phase| *phase);
        let Ok(Phase::Leaving { until }) = phase else {
            // It is gone altogether, which `comes` tells.
            return std::future::pending().await;
        };
        let left = until.saturating_duration_since(Instant::now());
        u32::try_from(left.as_millis()).unwrap_or(u32::MAX)
    }

    /// Resolves with the code to close with, when the host closes its sessions.
    async fn comes(mut self) -> CloseCode {
        // An error means that the host, or its compute thread, is gone altogether.
        tokio::select! {
            _ = self.phase.wait_for(|phase| *phase == Phase::Closing) => CloseCode::Shutdown,
            state = self.compute.wait_for(|state| *state != Running::Yes) => match state {
                Ok(state) if *state == Running::Ended => CloseCode::Shutdown,
                _ => CloseCode::Internal,
            },
        }
    }
}

/// Serves a session until it ends, or the host does.
pub(crate) async fn serve(
    mut connection: Connection,
    host_state: Arc<HostState>,
    end: End,
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
    // Its streams have ended when this resolves.
    let closed = connection.ended().await;
    events.session_ended(caller, closed.code, closed.by_us);
}

/// Runs the caller's rows. The code to close with, unless the session has ended already.
async fn pipeline(
    connection: &mut Connection,
    host_state: &Arc<HostState>,
    caller: Caller,
    end: End,
    max_unread: u64,
) -> Option<CloseCode> {
    let outlet = Arc::new(SessionOutlet {
        sender: connection.sender(),
        max_unread,
    });
    let stream_table = StreamTable::new(Arc::clone(host_state), caller, outlet.clone());
    connection.attend(Pipeline { stream_table });
    let mut announced = std::pin::pin!(end.clone().announced());
    let mut end = std::pin::pin!(end.comes());
    let mut told = false;
    loop {
        tokio::select! {
            biased;
            code = &mut end => return Some(code),
            within_ms = &mut announced, if !told => {
                told = true;
                outlet.send(Message::Leaving { within_ms });
            }
            _ = connection.ended() => return None,
        }
    }
}

/// Judges what the caller sends, in the task that reads it.
struct Pipeline {
    /// Ends the session's streams when it is dropped, which is when the session is over.
    stream_table: StreamTable,
}

impl Handler for Pipeline {
    fn message(&mut self, message: Message) -> Result<(), CloseCode> {
        self.stream_table.handle(message)
    }
}

/// Sends back what comes, for measuring the transport: tensors as they are, and for each
/// step the rows that it wants.
async fn echo(connection: &mut Connection, host_state: &HostState, end: End) -> Option<CloseCode> {
    let sender = connection.sender();
    let mut announced = std::pin::pin!(end.clone().announced());
    let mut end = std::pin::pin!(end.comes());
    let mut told = false;
    loop {
        let answer = tokio::select! {
            biased;
            code = &mut end => return Some(code),
            within_ms = &mut announced, if !told => {
                told = true;
                Some(Message::Leaving { within_ms })
            }
            message = connection.recv() => match message.ok()? {
                Message::Describe => match host_state.description() {
                    Ok(description) => Some(description),
                    Err(code) => return Some(code),
                },
                message => echoed(message),
            },
        };
        let Some(answer) = answer else {
            continue;
        };
        // A peer that takes nothing back is ended by the transport's deadlines.
        tokio::select! {
            biased;
            sent = sender.send(answer) => match sent {
                Ok(()) => {}
                Err(SendError::Message(violation)) => return Some(violation.code),
                Err(_) => return None,
            },
            code = &mut end => return Some(code),
        }
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
        Message::Step(step) => Some(Message::StepResult(bench::echo(step))),
        _ => None,
    }
}

/// Writes to the session from whatever thread has something to say. Answers never wait, so
/// a peer that does not read is cut off once too much has piled up for it.
struct SessionOutlet {
    sender: Sender,
    max_unread: u64,
}

impl Outlet for SessionOutlet {
    fn send_all(&self, messages: Vec<Message>) {
        match self.sender.try_send_all(&messages) {
            Ok(0) if self.sender.stats().queued_bytes <= self.max_unread => {}
            Ok(_) => self.sender.close(CloseCode::CreditStall),
            // The session's task sees it as well.
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
