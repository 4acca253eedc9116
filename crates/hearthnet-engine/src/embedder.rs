//! Vectors of texts on this machine alone.

use hearthnet_files::{ModelFile, Pooling};

use crate::cpu::Engine;
use crate::error::{EngineError, LoadError};
use crate::head::Head;
use crate::options::EngineOptions;
use crate::pooling::Pool;
use crate::sequence::Span;

/// Rows of a text that run together, if each attends to earlier ones only.
const PIECE_ROWS: usize = 256;

/// Whole model that makes vectors of texts.
///
/// ```no_run
/// use hearthnet_engine::{Embedder, EngineOptions};
/// use hearthnet_files::ModelFile;
///
/// let file = ModelFile::open("Qwen3-Embedding-0.6B-Q8_0.gguf".as_ref())?;
/// let mut embedder = Embedder::load(&file, &EngineOptions::default(), &mut |_, _| {})?;
/// let vector = embedder.embed(&[9707, 1879, 151_643])?; // token ids, as the file's tokenizer gives them
/// assert_eq!(vector.len(), file.spec().width as usize);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Embedder {
    engine: Engine,
    head: Head,
    pooling: Pooling,
}

impl Embedder {
    /// Loads a whole model. `progress` receives the bytes of the file read so far, and the total.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(
        file: &ModelFile,
        options: &EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let engine = Engine::load(file, 0..file.spec().layers, options, progress)?;
        let head = Head::beside(file, &engine)?;
        Ok(Self {
            engine,
            head,
            pooling: file.pooling(),
        })
    }

    /// Rule by which the states of a text become its vector.
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }

    /// Vector of a text, of length 1.
    ///
    /// # Errors
    /// See [`EngineError`]; [`EngineError::VectorOverflow`] if the hidden states are too large, and
    /// [`EngineError::EmptySpan`] for no token.
    pub fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>, EngineError> {
        let seq = self.engine.open()?;
        if ids.is_empty() {
            self.engine.close(seq);
            return Err(EngineError::EmptySpan(seq));
        }
        let spec = self.head.spec();
        let (shape, layers) = (spec.row_shape(), spec.layers as usize);
        let mut pool = Pool::new(self.pooling, spec.width as usize);
        let (mut rows, mut position) = (Vec::new(), 0);
        // Rows of an encoder attend to later ones.
        let together = match spec.encoder {
            Some(_) => ids.len(),
            None => PIECE_ROWS,
        };
        let mut run = || -> Result<(), EngineError> {
            for piece in ids.chunks(together) {
                self.head.embed(piece, &mut rows)?;
                // At most `PIECE_ROWS`, or the context, which `Head::embed` checks.
                let count = piece.len() as u32;
                self.engine
                    .forward(&[Span::new(seq, position, count)], &mut rows)?;
                shape.keep_outputs(layers, &mut rows);
                self.head.norm(&mut rows)?;
                pool.add(&rows);
                position += count;
            }
            Ok(())
        };
        let done = run();
        self.engine.close(seq);
        done?;
        pool.change(|state| self.head.project(state));
        pool.finish().ok_or(EngineError::VectorOverflow)
    }
}
