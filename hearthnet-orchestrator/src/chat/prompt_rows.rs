//! Work on the outputs of all tokens of a prompt: the tokens' log probabilities, and the vector of a
//! text.

use super::{Call, Conversation, engine};
use crate::error::ChatError;
use crate::frames::{Embedding, Frame, PromptToken};
use hearthnet_engine::EngineError;
use hearthnet_engine::pooling::Pool;
use hearthnet_tokens::sampler::Sampler;

/// Rows of a prompt that run together if all of their outputs are needed.
const PIECE_ROWS: usize = 256;
/// Rows whose logits are computed together for the log probabilities of a prompt.
const LOGITS_ROWS: usize = 16;

impl Conversation {
    /// Runs the whole prompt and sends the log probabilities of its tokens. Returns the last row.
    pub(super) async fn score(
        &mut self,
        ids: &[u32],
        sampler: &mut Sampler,
        call: &mut Call<'_>,
    ) -> Result<Vec<f32>, ChatError> {
        let model = call.model;
        let spec = model.head.spec();
        let (width, vocab) = (spec.width as usize, spec.vocab as usize);
        let (mut tokens, mut last) = (Vec::with_capacity(ids.len()), Vec::new());
        // The first token has no log probability, because no output precedes it.
        tokens.extend(ids.first().map(|&id| PromptToken {
            id,
            logprob: None,
            top_logprobs: Vec::new(),
        }));
        let mut following = ids.iter().skip(1);
        for piece in ids.chunks(PIECE_ROWS) {
            let mut rows = self.all_rows(piece, call).await?;
            for block in rows.chunks(LOGITS_ROWS * width) {
                if call.cancel.is_cancelled() {
                    return Err(ChatError::Cancelled);
                }
                let logits = model.head.logits_of_rows(block.to_vec()).await;
                let logits = logits.map_err(engine)?;
                for (logits, &id) in logits.chunks_exact(vocab).zip(&mut following) {
                    let scored = sampler.score(logits, id).map_err(engine)?;
                    tokens.push(PromptToken {
                        id,
                        logprob: scored.logprob,
                        top_logprobs: scored.top,
                    });
                }
            }
            last = rows.split_off(rows.len().saturating_sub(width));
        }
        call.listener.on_frame(&Frame::Prompt { tokens });
        call.listener.caught_up().await;
        Ok(last)
    }

    /// Runs a whole text and pools its hidden states.
    pub(super) async fn embed(
        &mut self,
        ids: &[u32],
        call: &mut Call<'_>,
    ) -> Result<Embedding, ChatError> {
        let head = &call.model.head;
        let mut pool = Pool::new(call.model.pooling, head.spec().width as usize);
        // Rows of an encoder attend to later ones.
        let together = match head.spec().encoder {
            Some(_) => ids.len().max(1),
            None => PIECE_ROWS,
        };
        for piece in ids.chunks(together) {
            if call.cancel.is_cancelled() {
                return Err(ChatError::Cancelled);
            }
            let mut rows = self.all_rows(piece, call).await?;
            head.norm(&mut rows).map_err(engine)?;
            pool.add(&rows);
        }
        pool.change(|state| head.project(state));
        let overflow = || engine(EngineError::VectorOverflow);
        pool.finish().map(Embedding).ok_or_else(overflow)
    }

    /// Runs tokens behind the held ones. Returns the output of each.
    async fn all_rows(&mut self, ids: &[u32], call: &mut Call<'_>) -> Result<Vec<f32>, ChatError> {
        self.submit(ids, true, call).await?;
        let mut rows = self.output(ids, call).await?;
        // After a failover, earlier rows may precede them.
        let wanted = ids.len() * call.model.head.spec().width as usize;
        rows.drain(..rows.len().saturating_sub(wanted));
        Ok(rows)
    }
}
