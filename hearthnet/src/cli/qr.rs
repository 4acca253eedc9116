//! QR codes: of a link, on the terminal; of an invite, for the page.

use std::fmt::Write as _;

use qrcode::{Color, QrCode};

/// Light border that readers need, in modules.
const QUIET: usize = 4;

pub(crate) struct Qr {
    /// Modules of one side, without the border.
    size: usize,
    modules: Vec<Color>,
}

impl Qr {
    /// QR code of a text; `None` if it is too long, at about 2,300 bytes.
    pub(crate) fn of(text: &str) -> Option<Self> {
        let code = QrCode::new(text).ok()?;
        Some(Self {
            size: code.width(),
            modules: code.to_colors(),
        })
    }

    /// Modules of one side, with the border.
    pub(crate) fn side(&self) -> usize {
        self.size + 2 * QUIET
    }

    /// Whether the module at this place is dark; the border is light.
    fn is_dark(&self, x: usize, y: usize) -> bool {
        let (Some(x), Some(y)) = (x.checked_sub(QUIET), y.checked_sub(QUIET)) else {
            return false;
        };
        x < self.size && self.modules.get(y * self.size + x) == Some(&Color::Dark)
    }

    /// Dark modules as the `d` of an SVG path, in a square of [`Self::side`].
    pub(crate) fn svg_path(&self) -> String {
        let mut path = String::new();
        for y in 0..self.side() {
            let mut x = 0;
            while x < self.side() {
                let run = (x..self.side()).take_while(|x| self.is_dark(*x, y)).count();
                if run > 0 {
                    let _ = write!(path, "M{x} {y}h{run}v1h-{run}z");
                }
                x += run + 1;
            }
        }
        path
    }

    /// Two rows of modules per line of text, light modules as blocks: readers need dark modules on a
    /// light ground, and most terminals are dark. The escape sequences fix both colours.
    pub(crate) fn terminal(&self) -> String {
        let mut text = String::new();
        for y in (0..self.side()).step_by(2) {
            text.push_str("\x1b[97;40m");
            for x in 0..self.side() {
                text.push(match (self.is_dark(x, y), self.is_dark(x, y + 1)) {
                    (false, false) => '█',
                    (false, true) => '▀',
                    (true, false) => '▄',
                    (true, true) => ' ',
                });
            }
            text.push_str("\x1b[0m\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_show_the_modules_of_the_code_within_a_light_border() {
        let qr = Qr::of("http://192.168.1.5:7602/#key=0123456789abcdef").unwrap();
        let dark: Vec<(usize, usize)> = (0..qr.side())
            .flat_map(|y| (0..qr.side()).map(move |x| (x, y)))
            .filter(|(x, y)| qr.is_dark(*x, *y))
            .collect();
        let border = |at: usize| at < QUIET || at >= qr.side() - QUIET;
        assert!(dark.iter().all(|(x, y)| !border(*x) && !border(*y)));
        // The finder pattern of the first corner: a ring of 7, and a square of 3 within it.
        let first: Vec<bool> = (0..7).map(|x| qr.is_dark(QUIET + x, QUIET + 3)).collect();
        assert_eq!(first, [true, false, true, true, true, false, true]);

        let mut drawn = Vec::new();
        for run in qr.svg_path().split('M').skip(1) {
            let (at, shape) = run.split_once('h').unwrap();
            let (x, y) = at.split_once(' ').unwrap();
            let (x, y): (usize, usize) = (x.parse().unwrap(), y.parse().unwrap());
            let width: usize = shape.split('v').next().unwrap().parse().unwrap();
            drawn.extend((x..x + width).map(|x| (x, y)));
        }
        assert_eq!(drawn, dark);

        let text = qr.terminal();
        assert_eq!(text.lines().count(), qr.side().div_ceil(2));
        let rows = text
            .lines()
            .map(|line| line.trim_start_matches("\x1b[97;40m"));
        let full = rows.map(|row| row.chars().filter(|c| *c == ' ').count());
        let both = |(x, y): &&(usize, usize)| y % 2 == 0 && qr.is_dark(*x, y + 1);
        assert_eq!(full.sum::<usize>(), dark.iter().filter(both).count());
    }

    #[test]
    fn a_text_that_fits_no_code_has_none() {
        assert!(Qr::of(&"x".repeat(2000)).is_some());
        assert!(Qr::of(&"x".repeat(4000)).is_none());
    }
}
