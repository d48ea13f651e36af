//! Aligned columns as text: the first to the left, the numbers to the right, wide cells cut.

use unhand_analyze::keep_end;

use crate::failure::Failure;
use crate::printer::Printer;

/// What stands between two columns.
const GAP: &str = "  ";
/// The first column is never cut shorter than this, however narrow the terminal.
const MIN_FIRST: usize = 16;

/// A table under construction: one heading, then rows of as many cells.
pub(crate) struct Table {
    heading: Vec<String>,
    rows: Vec<Row>,
}

struct Row {
    cells: Vec<String>,
    is_marked: bool,
}

impl Table {
    pub(crate) fn new(heading: &[&str]) -> Table {
        Table { heading: heading.iter().map(|&cell| cell.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row; a marked one is shown as something to look at.
    pub(crate) fn row(&mut self, cells: Vec<String>, is_marked: bool) {
        debug_assert_eq!(cells.len(), self.heading.len(), "a row has a cell for each column");
        self.rows.push(Row { cells, is_marked });
    }

    /// Prints the table, indented by `indent` spaces, no wider than the printer where that is possible.
    pub(crate) fn print(&self, printer: &mut Printer, indent: usize) -> Result<(), Failure> {
        let style = printer.style();
        let widths = self.widths(printer.width().saturating_sub(indent));
        let line = |cells: &[String]| {
            let mut line = " ".repeat(indent);
            for (column, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
                if column == 0 {
                    let cell = keep_end(cell, width);
                    line.push_str(&cell);
                    line.extend(std::iter::repeat_n(' ', width - length(&cell)));
                } else {
                    line.push_str(GAP);
                    line.extend(std::iter::repeat_n(' ', width.saturating_sub(length(cell))));
                    line.push_str(cell);
                }
            }
            line.truncate(line.trim_end().len());
            line
        };
        writeln!(printer, "{}", style.faint(line(&self.heading)))?;
        for row in &self.rows {
            let text = line(&row.cells);
            if row.is_marked {
                writeln!(printer, "{}", style.strong(text))?;
            } else {
                writeln!(printer, "{text}")?;
            }
        }
        Ok(())
    }

    /// Each column as wide as its widest cell; the first one gives way when the line gets too long.
    fn widths(&self, available: usize) -> Vec<usize> {
        let rows = self.rows.iter().map(|row| &row.cells).chain([&self.heading]);
        let mut widths = vec![0; self.heading.len()];
        for cells in rows {
            for (width, cell) in widths.iter_mut().zip(cells) {
                *width = length(cell).max(*width);
            }
        }
        let others: usize = widths.iter().skip(1).map(|width| width + GAP.len()).sum();
        if let Some(first) = widths.first_mut() {
            *first = (*first).min(available.saturating_sub(others).max(MIN_FIRST));
        }
        widths
    }
}

fn length(cell: &str) -> usize {
    cell.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widths(rows: &[[&str; 2]], available: usize) -> Vec<usize> {
        let mut table = Table::new(&["file", "peak"]);
        for row in rows {
            table.row(row.iter().map(|&cell| cell.to_owned()).collect(), false);
        }
        table.widths(available)
    }

    #[test]
    fn columns_are_as_wide_as_they_must_be() {
        assert_eq!(widths(&[], 80), [4, 4]);
        assert_eq!(widths(&[["a", "14.5 GiB"]], 80), [4, 8]);
    }

    #[test]
    fn the_first_column_gives_way_but_not_entirely() {
        let long = "x".repeat(100);
        assert_eq!(widths(&[[&long, "14.5 GiB"]], 80), [70, 8]);
        assert_eq!(widths(&[[&long, "14.5 GiB"]], 10), [MIN_FIRST, 8]);
    }
}
