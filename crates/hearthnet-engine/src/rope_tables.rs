//! RoPE tables of a model.

use hearthnet_files::ModelFile;
use hearthnet_files::families::{ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT};
use hearthnet_files::spec::{RopeScaling, Rotation};

use crate::error::LoadError;
use crate::kernels::RopeTable;

/// Tables grow by this many positions.
const STEP: usize = 256;

/// RoPE table of each [`Rotation`] of a model. The libtorch engine reads its angles from it, too.
#[derive(Debug)]
pub struct RopeTables {
    global: RopeTable,
    /// Table of blocks with a sliding window, if their base differs.
    local: Option<RopeTable>,
}

impl RopeTables {
    /// Empty tables for a model.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] when a frequency factor is not a positive normal number.
    pub fn of(file: &ModelFile) -> Result<Self, LoadError> {
        let spec = file.spec();
        let rope = &spec.rope;
        let mut frequencies = RopeTable::frequencies(rope.dims as usize, rope.theta);
        let mut amplitude = 1.0;
        match rope.scaling {
            None => {}
            Some(RopeScaling::Linear { factor }) => {
                frequencies.iter_mut().for_each(|f| *f /= factor);
            }
            Some(RopeScaling::Factors) => divide(file, ROPE_FACTORS, &mut frequencies)?,
            Some(RopeScaling::Long { long, amplitude: a }) => {
                let name = match long {
                    true => ROPE_FACTORS_LONG,
                    false => ROPE_FACTORS_SHORT,
                };
                divide(file, name, &mut frequencies)?;
                amplitude = a;
            }
            Some(RopeScaling::Yarn(yarn)) => {
                RopeTable::stretch(&mut frequencies, rope.theta, &yarn);
                amplitude = yarn.amplitude;
            }
        }
        let local = rope.local_theta.map(|theta| {
            let heads = spec.attention.window.and_then(|window| window.heads);
            let dims = heads.map_or(rope.dims, |heads| heads.rope_dims);
            let frequencies = RopeTable::frequencies(dims as usize, theta);
            RopeTable::new(rope.kind, frequencies, 1.0)
        });
        Ok(Self {
            global: RopeTable::new(rope.kind, frequencies, amplitude),
            local,
        })
    }

    pub fn cover(&mut self, positions: usize) {
        for table in [Some(&mut self.global), self.local.as_mut()] {
            if let Some(table) = table.filter(|table| table.positions() < positions) {
                table.cover(positions.next_multiple_of(STEP));
            }
        }
    }

    /// Table for a rotation; `None` for [`Rotation::None`].
    pub fn table(&self, rotation: Rotation) -> Option<&RopeTable> {
        match rotation {
            Rotation::None => None,
            Rotation::Global => Some(&self.global),
            Rotation::Local => Some(self.local.as_ref().unwrap_or(&self.global)),
        }
    }
}

/// Divides each frequency by its factor in tensor `name`.
fn divide(file: &ModelFile, name: &str, frequencies: &mut [f64]) -> Result<(), LoadError> {
    let view = file.tensor(name)?;
    let (factors, _) = view.bytes.as_chunks::<4>();
    for (frequency, factor) in frequencies.iter_mut().zip(factors) {
        let factor = f32::from_le_bytes(*factor);
        if !(f32::MIN_POSITIVE..=f32::MAX).contains(&factor) {
            let what = format!("{name:?} holds {factor}, which is not a positive number");
            return Err(LoadError::Unsupported(what));
        }
        *frequency /= f64::from(factor);
    }
    Ok(())
}
