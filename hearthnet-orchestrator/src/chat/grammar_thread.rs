//! Thread of an answer with a grammar: compiles the grammar and finds the tokens that may come next.
//!
//! The thread works while hosts compute. It keeps the work off the step loop, and has a stack for
//! what a hostile grammar makes of the compiler.
//!
//! ```text
//! chat:    sample a ─► accept(a) ─► submit a's row ─► deliver text ─► output ─► logits ─► allowed()
//!                          │                                                                 ▲
//! thread:                  └──────────► tokens that may follow a ────────────────────────────┘
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use hearthnet_tokens::Tokenizer;
use hearthnet_tokens::grammar::{Allowed, Constraint, Grammar, GrammarError};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::error::ChatError;

/// Stack of the thread: 64 KiB of schema hold a chain of 1,000 references, of about 16 KiB each.
const STACK: usize = 64 << 20;
/// How long a chat waits for its grammar. Schemas that people write take milliseconds.
const COMPILE_TIME: Duration = Duration::from_secs(3);
/// Maximum number of grammars that are compiled at once, of chats that have given up as well.
const MOST: usize = 8;

/// Grammars that are compiled now.
static COMPILING: AtomicUsize = AtomicUsize::new(0);

/// Chat's side of the thread. The thread ends soon after this is dropped.
pub(super) struct GrammarThread {
    accepted: Sender<u32>,
    allowed: UnboundedReceiver<Result<Allowed, GrammarError>>,
}

/// Slot of a grammar that is being compiled, of [`MOST`]. Dropping it frees the slot.
struct Compiling;

impl Compiling {
    fn begin() -> Result<Self, ChatError> {
        let place = Self;
        match COMPILING.fetch_add(1, Ordering::Relaxed) < MOST {
            true => Ok(place),
            false => Err(ChatError::Busy(format!(
                "{MOST} grammars are being compiled"
            ))),
        }
    }
}

impl Drop for Compiling {
    fn drop(&mut self) {
        COMPILING.fetch_sub(1, Ordering::Relaxed);
    }
}

impl GrammarThread {
    /// Compiles a grammar. `begins`: the answer is a text of its own. Blocks: for at most
    /// [`COMPILE_TIME`], and longer for the first grammar of a model.
    ///
    /// # Errors
    /// [`ChatError::Grammar`]; [`ChatError::Busy`] if too many are compiled.
    pub(super) fn start(
        tokenizer: &Tokenizer,
        grammar: Grammar,
        begins: bool,
    ) -> Result<Self, ChatError> {
        let vocabulary = tokenizer.grammar_vocabulary()?;
        let place = Compiling::begin()?;
        let (accepted, tokens) = channel();
        let (allow, allowed) = unbounded_channel();
        let (compiled, ready) = sync_channel(1);
        let work = move || {
            let answer = Constraint::new(vocabulary, &grammar, begins);
            drop(place);
            let (mut answer, result) = match answer {
                Ok(answer) => (Some(answer), Ok(())),
                Err(error) => (None, Err(error)),
            };
            // The chat may have given up.
            let waits = compiled.send(result).is_ok();
            while waits && let Some(answer) = &mut answer {
                let next = answer.allowed();
                let failed = next.is_err();
                if allow.send(next).is_err() || failed {
                    return;
                }
                let Ok(token) = tokens.recv() else {
                    return;
                };
                if let Err(error) = answer.accept(token) {
                    let _ = allow.send(Err(error));
                    return;
                }
            }
        };
        let thread = thread::Builder::new()
            .name("grammar".into())
            .stack_size(STACK);
        thread.spawn(work).map_err(|error| {
            ChatError::Engine(format!("cannot start a thread for the grammar: {error}"))
        })?;
        match ready.recv_timeout(COMPILE_TIME) {
            Ok(result) => result?,
            Err(_) => {
                let seconds = COMPILE_TIME.as_secs();
                let problem = format!("the grammar was not compiled within {seconds} s");
                return Err(GrammarError::TooComplex(problem).into());
            }
        }
        Ok(Self { accepted, allowed })
    }

    /// Adds a token to the answer. [`Self::allowed`] must follow before the next one.
    pub(super) fn accept(&self, token: u32) {
        // After an error the thread has ended; `allowed` returns it.
        let _ = self.accepted.send(token);
    }

    /// Tokens that may come next.
    ///
    /// # Errors
    /// [`ChatError::Grammar`] if nothing may follow, or finding it takes too much work.
    pub(super) async fn allowed(&mut self) -> Result<Allowed, ChatError> {
        let next = self.allowed.recv().await;
        Ok(next.unwrap_or(Err(GrammarError::Stuck))?)
    }
}
