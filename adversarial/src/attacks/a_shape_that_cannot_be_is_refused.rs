//! Sizes are products of numbers that the peer chose. They are multiplied with care, compared
//! with what is there, and with what the model takes.

use hearthnet_transport::CloseCode;

use crate::raw::{Frame, Step, chunk, dtype, kind};
use crate::{Bench, Findings, HarnessError, Verdict};

pub(super) struct Attack;

impl crate::Attack for Attack {
    const CASE: u8 = 34;

    async fn run(bench: &mut Bench) -> Result<Verdict, HarnessError> {
        let mut found = Findings::new();
        let code = CloseCode::TensorShape;
        let max = u32::MAX;
        for (what, dtype, dims) in [
            ("a product that overflows 64 bits", dtype::F32, vec![max; 3]),
            (
                "a product that overflows to zero",
                dtype::I8,
                vec![1 << 16; 4],
            ),
            ("a product that overflows to one", dtype::I8, vec![max; 8]),
            ("a dimension of zero", dtype::F16, vec![4, 0]),
            ("a rank of zero", dtype::F16, vec![]),
            ("a rank of nine", dtype::F16, vec![1; 9]),
            ("a rank of 255", dtype::F16, vec![1; 255]),
            ("element type 0", 0, vec![4]),
            ("element type 255", 255, vec![4]),
        ] {
            let mut peer = bench.pipeline().await?;
            let body = chunk(1, dtype, &dims, &[0; 8]);
            peer.send(Frame::new(kind::TENSOR_DATA, body)).await;
            found.ended(what, code, &peer.ending().await);
        }

        let width = bench.target().width;
        let good = Step {
            width,
            data: vec![0; width as usize * 2],
            ..Step::default()
        };
        for (what, rows, width, dtype) in [
            ("a step of no rows", 0, width, dtype::F16),
            ("a step of no width", 1, 0, dtype::F16),
            ("a step of more rows than it has", 2, width, dtype::F16),
            ("a step of 2^64 values", max, max, dtype::F16),
            ("a step whose size wraps around", 1 << 31, width, dtype::F32),
            ("a step of element type 9", 1, width, 9),
        ] {
            let step = Step {
                rows,
                width,
                dtype,
                ..good.clone()
            };
            let mut peer = bench.stream().await?;
            peer.send(step.frame()).await;
            found.ended(what, code, &peer.ending().await);
        }

        // Sound in itself, and not what this model takes: only the stream is refused.
        let narrow = Step {
            width: width / 2,
            data: vec![0; width as usize],
            ..good.clone()
        };
        let wide = Step {
            dtype: dtype::F32,
            data: vec![0; width as usize * 4],
            ..good.clone()
        };
        for (what, step) in [("rows of half the width", narrow), ("rows of fp32", wide)] {
            let mut peer = bench.stream().await?;
            peer.send(step.frame()).await;
            found.refused(what, code.as_str(), &peer.receive().await);
        }
        Ok(found.verdict())
    }
}
