//! The attacker's linear map.

/// Linear map from rows to embeddings: ridge regression over standardised values.
pub(crate) struct Probe {
    mean: Vec<f32>,
    scale: Vec<f32>,
    /// By input value, then by output value; the last row is the bias.
    map: Vec<f32>,
    width: usize,
}

impl Probe {
    pub(crate) fn learn(rows: &[f32], ids: &[u32], table: &[f32]) -> Self {
        let width = rows.len() / ids.len().max(1);
        let count = ids.len() as f64;
        let (mut mean, mut square) = (vec![0.0f64; width], vec![0.0f64; width]);
        for row in rows.chunks_exact(width) {
            for ((mean, square), x) in mean.iter_mut().zip(&mut square).zip(row) {
                *mean += f64::from(*x) / count;
                *square += f64::from(*x) * f64::from(*x) / count;
            }
        }
        let scale = mean.iter().zip(&square);
        let scale: Vec<f32> = scale
            .map(|(m, s)| 1.0 / (s - m * m).max(1e-12).sqrt() as f32)
            .collect();
        let mut probe = Self {
            mean: mean.into_iter().map(|m| m as f32).collect(),
            scale,
            map: Vec::new(),
            width,
        };
        let size = width + 1;
        let (mut a, mut b) = (vec![0.0f64; size * size], vec![0.0f64; size * width]);
        for (row, id) in rows.chunks_exact(width).zip(ids) {
            let x = probe.standard(row);
            let y = &table[*id as usize * width..][..width];
            for (i, xi) in x.iter().enumerate() {
                for (sum, xj) in a[i * size..][..=i].iter_mut().zip(&x) {
                    *sum += f64::from(xi * xj);
                }
                for (sum, yj) in b[i * width..][..width].iter_mut().zip(y) {
                    *sum += f64::from(xi * yj);
                }
            }
        }
        for i in 0..width {
            a[i * size + i] += count * 1e-4;
        }
        solve(&mut a, &mut b, size, width);
        probe.map = b.into_iter().map(|v| v as f32).collect();
        probe
    }

    /// Standardised row as in training, followed by a one.
    fn standard(&self, row: &[f32]) -> Vec<f32> {
        let each = row.iter().zip(&self.mean).zip(&self.scale);
        each.map(|((x, m), s)| (x - m) * s).chain([1.0]).collect()
    }

    pub(crate) fn map(&self, rows: &[f32]) -> Vec<f32> {
        let mut out = Vec::with_capacity(rows.len());
        for row in rows.chunks_exact(self.width) {
            let mut y = vec![0.0f32; self.width];
            for (x, weights) in self
                .standard(row)
                .iter()
                .zip(self.map.chunks_exact(self.width))
            {
                for (y, w) in y.iter_mut().zip(weights) {
                    *y += x * w;
                }
            }
            out.extend(y);
        }
        out
    }
}

/// Solves `a x = b` in place, for a symmetric positive `a` given by its lower half.
fn solve(a: &mut [f64], b: &mut [f64], size: usize, columns: usize) {
    // Cholesky: a = l l'.
    for i in 0..size {
        for j in 0..=i {
            let (x, y) = (&a[i * size..][..j], &a[j * size..][..j]);
            let sum: f64 = x.iter().zip(y).map(|(x, y)| x * y).sum();
            let rest = a[i * size + j] - sum;
            a[i * size + j] = match i == j {
                true => rest.max(1e-12).sqrt(),
                false => rest / a[j * size + j],
            };
        }
    }
    // l z = b from above, then l' x = z from below.
    for i in 0..size {
        let (above, rest) = b.split_at_mut(i * columns);
        let own = &mut rest[..columns];
        for (j, other) in above.chunks_exact(columns).enumerate() {
            subtract(own, a[i * size + j], other);
        }
        own.iter_mut().for_each(|v| *v /= a[i * size + i]);
    }
    for i in (0..size).rev() {
        let (until, below) = b.split_at_mut((i + 1) * columns);
        let own = &mut until[i * columns..];
        for (j, other) in (i + 1..).zip(below.chunks_exact(columns)) {
            subtract(own, a[j * size + i], other);
        }
        own.iter_mut().for_each(|v| *v /= a[i * size + i]);
    }
}

fn subtract(from: &mut [f64], factor: f64, what: &[f64]) {
    for (from, what) in from.iter_mut().zip(what) {
        *from -= factor * what;
    }
}
